"""The backend that programs are compiled for: Triton where its kernels run all of a model.

`auto` means triton on NVIDIA GPUs from capability 8.0 on, where triton can be imported and
kernels know the model's heads and dtype; else for torch, and the reason names the missing part.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph, sites_of
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES
from pcg.kernels.sizes import HEAD_SIZES, KERNEL_DTYPES, LEAST_CAPABILITY, PAGE_TOKENS
from pcg.options import Backend

_KERNELS = "pcg.kernels.triton.ops"
_NO_GPU = "the device is {}, not an NVIDIA GPU"
_WIDEST_ROW_BYTES = 4
"""Bytes of an element of an adapter's row, at most."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, "torch" or "triton", and in words why it was chosen."""

    name: Backend
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def machine_device(asked: str | torch.device | None = None) -> torch.device:
    """Return the requested device; else the GPU if the machine has one, else the CPU.

    Raises:
        UnsupportedError: torch does not know the device, or cannot use it.
    """
    if not asked:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=asked).device
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        usable = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        fix = f"use {' or '.join(usable)}"
        if str(asked).startswith("cuda") and torch.version.cuda is None:
            fix += ", or install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"the device {asked} cannot be used ({reason}); {fix}") from error


def choose_backend(
    asked: Backend, device: torch.device, model: ModelGraph | None = None
) -> BackendChoice:
    """Choose the backend of a program.

    Args:
        asked: "torch", "triton" or "auto".
        device: the device that it will run on.
        model: the model without bypass networks; if None, only the device counts.
    Raises:
        UnsupportedError: triton is requested, and is not installed.
    """
    if asked == "triton" and importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "backend='triton' needs the package triton, which exists for Linux alone: pip install "
            "'pcg[gpu]', or use backend='torch'"
        )
    if asked != "auto":
        return BackendChoice(asked, "it was asked for")
    obstacle = device_obstacle(device) or (model and model_obstacle(model))
    if obstacle:
        return BackendChoice("torch", obstacle)
    from pcg.kernels.triton.ptxas import used_ptxas

    major, minor = torch.cuda.get_device_capability(device)
    assembler = used_ptxas(10 * major + minor).name
    return BackendChoice("triton", f"the device is {_device_text(device)}, by {assembler}")


def backend_for(device: str, model: ModelGraph) -> BackendChoice:
    """Return the backend that `auto` means on "cpu" or "cuda", without such a device."""
    obstacle = _NO_GPU.format(device) if device == "cpu" else model_obstacle(model)
    if obstacle is not None:
        return BackendChoice("torch", obstacle)
    least = ".".join(map(str, LEAST_CAPABILITY))
    return BackendChoice("triton", f"on NVIDIA GPUs of capability {least} or later")


def device_obstacle(device: torch.device) -> str | None:
    """Return why programs for Triton do not run on a device; None if they do."""
    if device.type != "cuda":
        return _NO_GPU.format(device.type)
    if torch.version.hip is not None:
        return "Triton's kernels are for NVIDIA GPUs, and this torch is built for AMD's"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"Triton's kernels need capability {least}, and there is {_device_text(device)}"
    if _interprets():
        return "TRITON_INTERPRET is set, which runs Triton's kernels slowly, for tests"
    try:
        importlib.import_module(_KERNELS)
    except ImportError as error:
        return f"{_KERNELS} cannot be imported ({error})"
    return product_failure(device)


def product_failure(device: torch.device) -> str | None:
    """Return why a GPU's products are wrong, and the fix; see `pcg.kernels.triton.ptxas`."""
    from pcg.kernels.triton.ptxas import failure

    return failure(device)


def check_device(backend: Backend, device: torch.device) -> None:
    """Raise an UnsupportedError with a fix if a backend's programs do not run right on a device."""
    if backend == "triton" and device.type != "cuda" and not _interprets():
        raise UnsupportedError(
            "the program is compiled for Triton, which runs on NVIDIA GPUs, and its device is "
            f"{device.type}; compile it for PyTorch (--backend torch), or set TRITON_INTERPRET=1 "
            "to run its kernels on the CPU, slowly: it is meant for tests"
        )
    if backend == "triton" and not _interprets() and (wrong := product_failure(device)):
        raise UnsupportedError(f"{wrong}; or compile the program for PyTorch (--backend torch)")


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def model_obstacle(model: ModelGraph) -> str | None:
    """Return the part of a model that Triton's kernels do not know; None if they know all."""
    layers = [model.blocks[block] for block in model.layers]
    for block in model.blocks:
        for inputs in _attentions(block):
            q, _, v = (block.types[name] for name in inputs)
            size = next((x.features[-1] for x in (q, v) if x.features[-1] not in HEAD_SIZES), None)
            if size is not None:
                sizes = ", ".join(map(str, HEAD_SIZES))
                return f"attention kernels know no heads of {size}; their sizes are {sizes}"
            if q.dtype not in KERNEL_DTYPES:
                return f"attention kernels do not compute in {TORCH_NAMES[q.dtype]}"
    page_bytes = PAGE_TOKENS * sum(map(_kv_bytes, layers))
    # Adapters of the output head are rare, and are refused by name where their rows are too long.
    sites = (shape for block in model.blocks for shape in sites_of(block).values())
    widest = max((size for shape in sites for size in shape), default=0)
    if page_bytes < widest * _WIDEST_ROW_BYTES:
        return (
            f"an adapter's row of {widest} elements is longer than a page of the KV cache, "
            f"{page_bytes} bytes"
        )
    return None


def _attentions(block: Graph) -> list[tuple[str, ...]]:
    return [node.inputs[:3] for node in block.nodes if node.op == "attention"]


def _kv_bytes(block: Graph) -> int:
    kept = [block.types[name] for inputs in _attentions(block) for name in inputs[1:]]
    return sum(int(prod(x.features)) * DTYPE_BYTES[x.dtype] for x in kept)


def _device_text(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} of capability {major}.{minor}"


@functools.cache
def compiled() -> Counter[str]:
    """Count how often each kernel was compiled, or read from Triton's cache on disk, from now on.

    Triton compiles a kernel, which takes about a second, for each way to specialise it: by
    constants, by types, and by whether numbers and addresses are 1 or multiples of 16.
    """
    from triton import knobs

    counts: Counter[str] = Counter()
    before = knobs.runtime.jit_post_compile_hook

    def note(*arguments: Any, fn: Any, **named: Any) -> Any:
        counts[fn.name] += 1
        return None if before is None else before(*arguments, fn=fn, **named)

    knobs.runtime.jit_post_compile_hook = note
    return counts

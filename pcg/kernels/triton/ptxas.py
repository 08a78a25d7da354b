"""The assembler of Triton's kernels, and a check that it gets Hopper's products right.

Hopper's products (WGMMA) run beside other instructions and read one side from registers. ptxas up
to CUDA 13.2 may give those registers to other values before they are read, and the product is wrong
(triton-lang/triton pull request 11781; CUDA 13.3's release notes). Triton ships two ptxas: up to
3.8 it takes the older one for Hopper, so the newer one is preferred here, and `failure` runs a
product whose bits are known before any program does.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

FIXED = (13, 3)
"""The first version of ptxas that is known to be right."""
_PATH = "TRITON_PTXAS_PATH"
_HOPPER = 90
_ROWS, _KEYS, _SIZE, _STEPS = 64, 64, 128, 24
"""A tile of attention's product of weights and values, over so many blocks of keys."""


@dataclass(frozen=True)
class Ptxas:
    """An assembler: its path, and its version, as (13, 4)."""

    path: str
    version: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        return self.version >= FIXED

    def __str__(self) -> str:
        return f"ptxas {'.'.join(map(str, self.version))} ({self.path})"


def used_ptxas(architecture: int) -> Ptxas:
    """Return the assembler that Triton takes for an architecture, such as 90."""
    return _tool(get_ptxas(architecture))


def prefer_newest() -> None:
    """Have Triton take the newer one of its two assemblers for Hopper.

    `TRITON_PTXAS_PATH`, where it is set, is left as it is: it is the user's choice.
    """
    if os.environ.get(_PATH):
        return
    newest = max((_tool(knobs.nvidia.ptxas), _tool(knobs.nvidia.ptxas_blackwell)), key=_version)
    if newest.version > used_ptxas(_HOPPER).version:
        os.environ[_PATH] = newest.path


def _tool(found: object) -> Ptxas:
    path, version = (getattr(found, name) for name in ("path", "version"))
    return Ptxas(str(path), tuple(map(int, str(version).split("."))))


def _version(ptxas: Ptxas) -> tuple[int, ...]:
    return ptxas.version


@triton.jit
def weighted_values(
    scores, values, out, steps,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out = Σ over steps of exp2(scores) · values, [ROWS, SIZE], the weights in registers."""
    row = tl.arange(0, ROWS)[:, None]
    size = tl.arange(0, SIZE)[None, :]
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for step in range(steps):
        key = step * KEYS + tl.arange(0, KEYS)
        weights = tl.exp2(tl.load(scores + row * steps * KEYS + key[None, :]))
        value = tl.load(values + key[:, None] * SIZE + size)
        total = tl.dot(weights.to(value.dtype), value, total)
    tl.store(out + row * SIZE + size, total)


def products(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what the kernel computes on a device, and what it has to, on the CPU.

    Weights are powers of two and values small integers, so that every sum is exact.
    """
    keys = _STEPS * _KEYS
    seed = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, (_ROWS, keys), generator=seed).float()
    values = torch.randint(-4, 5, (keys, _SIZE), generator=seed).float()
    out = torch.empty(_ROWS, _SIZE, device=device)
    weighted_values[(1,)](
        scores.to(device), values.to(device, torch.bfloat16), out, _STEPS,
        ROWS=_ROWS, KEYS=_KEYS, SIZE=_SIZE, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, torch.exp2(scores) @ values


@functools.cache
def failure(device: torch.device) -> str | None:
    """Return what is wrong with products on a GPU, and the fix; None where they are right.

    It waits for the device, once. GPUs before and after Hopper have other products.
    """
    if torch.cuda.get_device_capability(device)[0] != _HOPPER // 10:
        return None
    prefer_newest()
    found, exact = products(device)
    if torch.equal(found.cpu(), exact):
        return None
    return (
        f"{used_ptxas(_HOPPER)} gets products of Hopper's tensor cores wrong; install a Triton "
        f"with ptxas {'.'.join(map(str, FIXED))} or later, or set {_PATH} to one"
    )

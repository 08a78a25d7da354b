"""Times of products on this machine's CPU, by which `auto` chooses a dtype or a weight format.

They are measured once for each user, machine and version, in a second, and kept in the user's
cache. `pcg doctor` shows them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from pcg.files import cache_folder
from pcg.formats.registry import FORMATS
from pcg.kernels.torch.products import has_onednn, linear, stand_in_tensor
from pcg.kernels.torch.quantized import Block, QuantizedWeight
from pcg.native_library import processor
from pcg.version import __version__

Times = Mapping[str, Mapping[str, float]]
"""Milliseconds of products by a matrix of `SIZE` x `SIZE`, by dtype or format, and tokens."""

SIZE = 2048
TOKENS = (1, 16, 512)
_FLOATS = ("float32", "bfloat16")
_FORMATS = ("int8", "nf4")
_GAIN = 0.9
"""The share of the time from which on another dtype or format is worth its rounding."""


def fastest_dtype(device: torch.device) -> str:
    """Return the dtype in which products are fastest: on CPUs as measured, else of 16 bits."""
    if device.type != "cpu":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if _share("bfloat16", "float32") < _GAIN else "float32"


def fastest_format(device: torch.device, dtype: str) -> str | None:
    """Return the format that is faster than a dtype's products; None to keep float weights.

    Only int8 is considered, which changes perplexity least (docs/results.md).
    """
    if device.type != "cpu" or dtype not in _FLOATS:
        return None
    return "int8" if _share("int8", dtype) < _GAIN else None


def _share(name: str, of: str) -> float:
    """Return the time of products relative to another's: the geometric mean over tokens."""
    times = product_times()
    shares = [times[name][str(tokens)] / times[of][str(tokens)] for tokens in TOKENS]
    return float(prod(shares) ** (1 / len(shares)))


@functools.cache
def product_times() -> Times:
    """Return the times of this machine, from the cache or measured."""
    path = _cached()
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.keys() == {*_FLOATS, *_FORMATS}:
            return known
    times = _measured()
    with suppress(OSError):  # a cache that cannot be written is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{os.getpid()}-{path.name}")
        beside.write_text(json.dumps(times), encoding="utf-8")
        beside.replace(path)
    return times


def _cached() -> Path:
    facts = (__version__, torch.__version__, platform.node(), processor(), torch.get_num_threads())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return cache_folder("products") / f"{digest}.json"


def _packed(weight: Tensor) -> Tensor:
    """Return a weight as products of a served model read it."""
    if not has_onednn(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    packed.plain = (weight,)  # type: ignore[attr-defined]
    return packed


@torch.inference_mode()
def _measured() -> Times:
    weight = 0.02 * torch.randn(SIZE, SIZE)
    weights = {name: _packed(weight.to(getattr(torch, name))) for name in _FLOATS}
    for name in _FORMATS:
        format_ = FORMATS[name]
        block = Block(format_, format_.packed(format_.quantize(weight)))
        weights[name] = stand_in_tensor(weight.shape, weight.dtype, QuantizedWeight((block,)))
    times: dict[str, dict[str, float]] = {}
    for name, matrix in weights.items():
        times[name] = {}
        for tokens in TOKENS:
            x = torch.randn(tokens, SIZE, dtype=matrix.dtype)
            linear(x, matrix)  # compiles what it needs
            runs = []
            for _ in range(3):
                started = time.perf_counter()
                linear(x, matrix)
                runs.append(time.perf_counter() - started)
            times[name][str(tokens)] = round(1e3 * min(runs), 3)
    return times

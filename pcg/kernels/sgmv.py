"""LoRA of few tokens for each of many adapters by a native kernel, compiled where it runs.

A decode step reads the weights of all its adapters once. PyTorch's batched products read them at
about half of the memory's bandwidth, and the kernel in `sgmv.cpp` at all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import JoinedLora, Segments, once
from pcg.native_library import NativeFunction, load, load_optional

FEW_TOKENS = 64
"""The most tokens of one adapter that the kernel takes: for 1 to 48 of them it needs 0.4 to 0.85 of
the time of PyTorch's products, on one thread of an AMD EPYC, for ranks of 8 to 64 and sizes of 512
to 1,376; for unequal segments 0.25 to 0.5. benchmarks/generation.py compares whole steps."""

_MOST_RANKS = 16384
"""The most ranks of a site that the kernel holds products of: kHeld in `sgmv.cpp`."""
_SOURCE = Path(__file__).with_name("sgmv.cpp")
_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _kernel() -> Any:
    """Return the kernel; None where it cannot be compiled, which is logged once."""
    library = load_optional(_SOURCE, "adapters' products")
    if library is None:
        return None
    return NativeFunction(library, "pcg_add_lora")


def is_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the native kernel multiplies by weights of a device and dtype.

    It reads A as [slots, ranks, in] and B as [slots, outputs, rank, out].
    """
    return device.type == "cpu" and dtype in _DTYPES and _kernel() is not None


def check_native(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Raise an UnsupportedError if the option `name` needs the native kernel, which is missing."""
    if device.type != "cpu":
        raise UnsupportedError(f"{name} is for CPUs, and the device is {device}; leave it out")
    if not is_native(device, dtype):
        try:
            load(_SOURCE)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name} needs the native kernel: {error}") from error


@dataclass(frozen=True)
class _Table:
    """Numbers that the kernel reads, and their address."""

    numbers: NDArray[np.int64]
    address: int


@dataclass(frozen=True)
class _FewTokens:
    """First token, end and slot of each segment for the kernel, and the other segments."""

    table: _Table
    others: Segments | None


def add_lora_of_few(y: Tensor, x: Tensor, every: Sequence[JoinedLora]) -> Sequence[JoinedLora]:
    """Add the LoRA of segments of few tokens to y [T, outs]; return the LoRA that is left.

    Args:
        every: the LoRA of adapters of each width.
    """
    is_known = x.dtype in _DTYPES and y.dtype in _DTYPES and x.stride(1) == y.stride(1) == 1
    is_traced = type(x) is not Tensor or torch.is_grad_enabled()
    if not every or not is_known or is_traced or _site(every[0]) is None:
        return every
    wide = x.to(torch.float32)
    matrices = y.data_ptr(), y.stride(0), wide.data_ptr(), wide.stride(0)
    threads, is_bf16, kernel = torch.get_num_threads(), y.dtype is torch.bfloat16, _kernel()
    others = []
    for lora in every:
        few = once(lora.segments.known, "few", partial(_few_tokens, lora.segments))
        site = _site(lora)
        if few is None or site is None:
            others.append(lora)
            continue
        table = few.table
        count = len(table.numbers)
        rounded = lora.a.dtype is torch.bfloat16
        kernel(*matrices, site.address, table.address, count, threads, is_bf16, rounded)
        if few.others is not None:
            others.append(replace(lora, segments=few.others))
    return others


def _few_tokens(segments: Segments) -> _FewTokens | None:
    stops = list(accumulate(segments.sizes))
    few, loose = [], []
    for slot, (size, stop) in enumerate(zip(segments.sizes, stops, strict=True)):
        if size > FEW_TOKENS:
            loose.append((slot, stop - size, stop))
        elif size:
            few.append((segments.start + stop - size, segments.start + stop, slot))
    if not few:
        return None
    others = replace(segments, size=0, gathered=None, loose=tuple(loose)) if loose else None
    return _FewTokens(_table(few), others)


def _site(lora: JoinedLora) -> _Table | None:
    """Return the addresses of a site's weights; None if the kernel cannot read their layout."""
    return once(lora.known, "site", partial(_made_site, lora))


def _made_site(lora: JoinedLora) -> _Table | None:
    a, every = lora.a, [lora.a, *(run.b for run in lora.parts)]
    lies_so = a.stride(2) == 1 and all(run.b.stride(2) == 1 for run in lora.parts)
    fits = a.shape[1] <= _MOST_RANKS
    if not (lies_so and fits and all(is_native(tensor.device, tensor.dtype) for tensor in every)):
        return None
    numbers = [a.data_ptr(), a.stride(0), a.stride(1), a.shape[2], a.shape[1]]
    parts = []
    for run in lora.parts:
        _, count, out, rank = run.b.shape
        for i in range(count):
            b = run.b[:, i]
            row, column = run.row + i * rank, lora.column + run.column + i * out
            parts.append([b.data_ptr(), b.stride(0), b.stride(2), rank, row, column, out])
    return _table([*numbers, len(parts), *(number for part in parts for number in part)])


def _table(numbers: Any) -> _Table:
    array = np.array(numbers, dtype=np.int64)
    return _Table(array, array.ctypes.data)

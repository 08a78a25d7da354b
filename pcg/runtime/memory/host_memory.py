"""Memory of the host: freed tensors go back to the system, and oneDNN's caches are bounded.

By default, glibc allocates tensors below 32 MiB in a heap, and raises this threshold as tensors are
freed; the heap keeps freed memory in holes that later tensors may not fit. A process that trains
within a plan may therefore use up to three times the plan's memory. Two remedies:

`return_freed_memory`: above a fixed threshold, each tensor is a separate mapping, which is unmapped
when the tensor is freed. Each tensor takes fresh pages, which the kernel zeroes, so that a step
takes half as long again. Used for budgets below 1.

`FreedMemory`: before each product of a step, the pages of all holes return to the system
(malloc_trim) if

    resident bytes of the heap  >  (1 + SLACK) * peak of used bytes so far

Most holes are reused before, so that a step takes a seventh of those fresh pages.
`benchmarks/finetuning.py` measures the memory, the seconds and the fresh pages.

oneDNN compiles a product for each number of tokens and shape of a weight, and torch and oneDNN each
cache the last 1,024 products: up to 0.3 MiB each, hundreds of MiB after requests of all lengths.
Compiling a product again takes 0.1 ms, once for all layers of a step, so the caches are limited to
recurring products: steps that decode, and common chunks of prompts.
`tests/runtime/memory/test_memory.py` measures the memory of a new shape.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from pcg.kernels.torch.products import ProductRequest, Result

THRESHOLD_BYTES = 128 * 2**10
"""The minimum size of a tensor with a separate mapping: glibc's initial threshold."""

SLACK = 0.08
"""The limit of holes, relative to the peak of used bytes; more slack means fewer fresh pages."""

TRAINER_SLACK = 1.0
"""The limit for trainers. Calls have batches of various sizes, with other work between them, so
that holes rarely fit: with 0.08, fresh pages took a quarter of a step's time."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3), by glibc's malloc.h."""

_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_OWN_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


@functools.cache
def return_freed_memory() -> bool:
    """Make this process return freed tensors to the system; return True on success.

    No effect without glibc, or if the process's environment sets the thresholds.
    """
    if platform.libc_ver()[0] != "glibc" or is_set_by(os.environ):
        return False
    libc = ctypes.CDLL(None)
    parameters = (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    is_set = all(libc.mallopt(parameter, THRESHOLD_BYTES) for parameter in parameters)
    libc.malloc_trim(0)  # returns memory freed earlier
    return is_set


def is_set_by(environment: Mapping[str, str]) -> bool:
    """Return True if an environment chooses the thresholds of glibc's malloc."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    named = any(name in environment for name in _OWN_SETTINGS)
    return named or any(name in tunables for name in _OWN_TUNABLES)


class FreedMemory:
    """Returns freed memory of this process to the system, by glibc 2.33 or newer.

    Args:
        slack: the limit of holes, relative to the peak of used bytes.
    """

    def __init__(self, slack: float = SLACK) -> None:
        self._libc = _glibc()
        self._slack = slack
        self._most = 0
        if self._libc is not None:
            self._libc.malloc_trim(0)
            self._floor = self._used_bytes()
            self._base = _anonymous_bytes() - self._floor

    def between(self, requests: ProductRequest[Result]) -> ProductRequest[Result]:
        """Run a function that requests products, and check the memory at each product."""
        if self._libc is None:
            return (yield from requests)
        try:
            while True:
                product = next(requests)
                self.look()
                yield product
        except StopIteration as end:
            result: Result = end.value
        self.look()
        return result

    def look(self) -> None:
        """Return freed memory to the system if the limit is exceeded."""
        if self._libc is None:
            return
        # Resident bytes of tensors and holes, without the bytes used at the start.
        held = _anonymous_bytes() - self._base - self._floor
        if self._is_within(held):
            return
        self._most = max(self._most, self._used_bytes() - self._floor)
        if not self._is_within(held):
            self._libc.malloc_trim(0)
            # Memory that is not returned does not belong to the heap's holes.
            self._base = _anonymous_bytes() - self._used_bytes()

    def _is_within(self, held_bytes: int) -> bool:
        return held_bytes <= self._most * (1 + self._slack)

    def _used_bytes(self) -> int:
        numbers = self._libc.mallinfo2()
        return int(numbers.uordblks + numbers.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """The numbers of mallinfo2(3): `uordblks` are used bytes of heaps, `hblkhd` of mappings."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _glibc() -> Any:
    if platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not os.path.exists("/proc/self/statm"):
        return None
    library.mallinfo2.restype = _Mallinfo2
    return library if library.mallinfo2().uordblks else None


def _anonymous_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        fields = statm.read().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


KEPT_PRODUCTS = 256
"""About five shapes of weights times fifty numbers of tokens."""

CAPACITIES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""The variables of torch (ideep) and oneDNN, both read at the process's first product by oneDNN."""


def untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, memory is committed only when it is written."""
    size_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bound_shape_caches() -> None:
    """Limit the caches, unless the environment does, or oneDNN has already run.

    Child processes inherit the limits.
    """
    for name in CAPACITIES:
        os.environ.setdefault(name, str(KEPT_PRODUCTS))

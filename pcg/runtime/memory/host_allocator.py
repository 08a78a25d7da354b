"""The C library's allocator, told to give freed tensors back to the system.

A step's tensors come and go in many sizes. By default glibc puts those below 32 MiB into one heap,
and raises that bound as it sees them freed; the heap keeps what was freed, in holes that the next
tensor may not fit. So a process that trains within a plan has up to three times the plan's memory.
Above a fixed threshold each tensor is a mapping of its own, which is gone once it is freed:

    resident memory over a step  =  the floor before it + the bytes that are alive

The price is that fresh pages are zeroed by the kernel, half as long again for a step, so this
is for those who ask for less memory, by a budget below 1. `benchmarks/bench_peak.py` measures both.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping

THRESHOLD_BYTES = 128 * 2**10
"""The least size of a tensor with a mapping of its own: where glibc starts, before it raises it."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3), by glibc's malloc.h."""

_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_OWN_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


@functools.cache
def return_freed_memory() -> bool:
    """Let this process return freed tensors to the system from now on; return True if it does.

    Nothing happens where the C library is not glibc, or where the process's environment sets the
    thresholds itself.
    """
    if platform.libc_ver()[0] != "glibc" or is_set_by(os.environ):
        return False
    libc = ctypes.CDLL(None)
    parameters = (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    is_set = all(libc.mallopt(parameter, THRESHOLD_BYTES) for parameter in parameters)
    libc.malloc_trim(0)  # of what was freed before
    return is_set


def is_set_by(environment: Mapping[str, str]) -> bool:
    """Return True if an environment chooses the thresholds of glibc's malloc."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    named = any(name in environment for name in _OWN_SETTINGS)
    return named or any(name in tunables for name in _OWN_TUNABLES)

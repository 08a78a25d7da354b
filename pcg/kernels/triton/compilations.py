"""Compilations of Triton's kernels: each takes about a second, for which whoever needs it waits.

Triton compiles a kernel anew for each way in which it specialises it: by constants, by types, and
by whether numbers and addresses are 1 or multiples of 16.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any


@functools.cache
def compiled() -> Counter[str]:
    """Return how often each kernel was compiled, or read from Triton's cache on disk.

    It counts in this process from the first call on.
    """
    from triton import knobs

    found: Counter[str] = Counter()
    before = knobs.runtime.jit_post_compile_hook

    def note(*given: Any, fn: Any, **named: Any) -> Any:
        found[fn.name] += 1
        return None if before is None else before(*given, fn=fn, **named)

    knobs.runtime.jit_post_compile_hook = note
    return found

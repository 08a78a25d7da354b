"""Tensors that are alive: those made within a context, what objects hold, and their bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType

import torch
from torch import Tensor

from pcg.kernels.triton.adapters import trained_adapters

REMEMBERED = [
    one.__wrapped__
    for one in vars(trained_adapters).values()
    if hasattr(getattr(one, "__wrapped__", None), "cache_info")
]
"""Caches of kernels' small tables of tokens."""
assert REMEMBERED


@contextmanager
def new_tensors() -> Iterator[Callable[[], list[Tensor]]]:
    """Yield a function that returns the CPU's live tensors that were made within the context."""

    def live() -> list[Tensor]:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
        return [one for one in found if one.device.type == "cpu"]

    gc.collect()
    gc.freeze()  # what there is already is not looked at again: that takes seconds
    try:
        yield live
    finally:
        gc.unfreeze()


def live_bytes(tensors: list[Tensor]) -> int:
    """The bytes of memory that tensors take, where they overlap once."""
    total = sum(tensor.nbytes for tensor in tensors if tensor.is_mkldnn)
    plain = [tensor for tensor in tensors if not tensor.is_mkldnn and tensor.nbytes]
    end = 0
    for start, stop in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in plain):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def memory_of(tensor: Tensor) -> int:
    """What tensors of the same memory have alike."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def reached(roots: Sequence[object], stop: Sequence[object]) -> list[Tensor]:
    """The tensors that objects hold, through others but those of `stop`, classes and functions."""
    seen = {id(one) for one in stop}
    found, queue = [], list(roots)
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        else:
            queue += gc.get_referents(one)
    return found

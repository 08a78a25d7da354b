"""The most bytes of tensors alive at once while something runs: the oracle of a predicted peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follows the storages that operators make, from their making until they are freed.

    Attributes:
        live_bytes: of storages made since the start that are alive.
        peak_bytes: the most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and self._key(x) not in before:
                self._follow(x)
        return result

    @staticmethod
    def _key(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    def _follow(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)


def peak_of(run: Callable[[], object]) -> int:
    """Bytes of tensors alive at once that `run` makes, at most."""
    with LiveMemory() as memory:
        run()
    return memory.peak_bytes

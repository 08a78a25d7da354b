"""A CUDA graph on the CPU: what ran is done again with the same memory, and no code of the host's.

While it records, every operator of PyTorch and every launch of a kernel in Triton's interpreter is
noted, with its arguments: tensors by where they lie, all else by value. Replaying does these again,
in order, into the memory of then. So what a replay gives depends on what lies in memory that stays
and on nothing that the host computes, as a graph's does; fresh memory is filled with NaN, or with
numbers that are no index.

To give the host numbers, or to make tensors of the host's, is an error meanwhile, as in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from tests.support.interpreter.streams import spoil

_WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.nonzero.default,
}
"""Operators that give the host something, or make a tensor of its numbers."""
EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_like.default,
}


class Tape:
    """A `Recorder`.

    Attributes:
        recorded: how often something was recorded.
        replayed: how often something was replayed.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function; it is called twice, as for a graph."""
        # Tokens of no one are made of whatever lies in fresh memory.
        with np.errstate(all="ignore"):
            run()
            with self.noting() as notes:
                run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            with np.errstate(all="ignore"):
                for again in notes:
                    again()

        return replay

    @staticmethod
    @contextmanager
    def noting() -> Iterator[list[Callable[[], None]]]:
        """Note what runs within."""
        notes: list[Callable[[], None]] = []
        with _Operators(notes), _launches(notes):
            yield notes


class _Operators(TorchDispatchMode):
    """Notes operators."""

    def __init__(self, notes: list[Callable[[], None]]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator in _WAITS:
            raise RuntimeError(f"{operator} waits for the device while a step is recorded")
        found = operator(*args, **kwargs)
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        if operator in EMPTY:
            for x in made:
                self._notes.append(lambda x=x: spoil(x))
            return found
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        own = [i for i, x in enumerate(made) if _memory(x) not in given]
        changes = operator._schema.is_mutable
        if not own and not changes:
            return found  # a view

        def again() -> None:
            redone = [x for x in tree_leaves(operator(*args, **kwargs)) if isinstance(x, Tensor)]
            for i in own:
                made[i].copy_(redone[i])

        self._notes.append(again)
        return found


def _memory(x: Tensor) -> int:
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr()


@contextmanager
def _launches(notes: list[Callable[[], None]]) -> Iterator[None]:
    """Note launches; operators that the interpreter itself calls are not noted."""
    run = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes.append(lambda: run(self, *args, **kwargs))
        with torch._C._DisableTorchDispatch():
            return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = run

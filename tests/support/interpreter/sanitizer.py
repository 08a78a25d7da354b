"""Accesses out of bounds, and races between programs, found in Triton's interpreter.

While it is on, a load or store (masked elements aside) has to hit memory of a tensor that the
kernel was given, and what one program of a launch stores no other may store or load. Atomics are
checked for bounds alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter

_Builder, _Grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
_CHANGED = (
    (_Builder, "create_masked_load"),
    (_Builder, "create_masked_store"),
    (_Builder, "create_atomic_rmw"),
    (_Grid, "_init_args_hst"),
    (_Grid, "__call__"),
)


class _Launch:
    """The memory that the programs of one launch touched."""

    def __init__(self) -> None:
        self.memory: list[tuple[int, int]] = []
        self.stored: list[tuple[tuple[int, ...], Any]] = []
        self.loaded: list[tuple[tuple[int, ...], Any]] = []

    def check(self, builder: Any, pointers: Any, mask: Any, kind: str) -> Any:
        """The addresses. IndexError: one is in no tensor of the launch."""
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        chosen = np.broadcast_to(mask.data, shape)
        addresses = np.broadcast_to(pointers.data, shape)[chosen]
        inside = np.zeros(addresses.shape, bool)
        for low, high in self.memory:
            inside |= (addresses >= low) & (addresses < high)
        if not inside.all():  # comes out as triton's InterpreterError
            raise IndexError(f"a {kind} out of bounds in program {builder.grid_idx}")
        return np.unique(addresses)

    def check_races(self) -> None:
        """RuntimeError: what a program stores, another loads or stores."""
        numbers: dict[tuple[int, ...], int] = {}

        def joined(touched: Any) -> tuple[Any, Any]:
            addresses = [np.empty(0, np.uint64), *(found for _, found in touched)]
            owners = [
                np.full(found.size, numbers.setdefault(program, len(numbers)))
                for program, found in touched
            ]
            return np.concatenate(addresses), np.concatenate([np.empty(0, np.int64), *owners])

        stored, by = joined(self.stored)
        loaded, reader = joined(self.loaded)
        if not stored.size:
            return
        order = np.argsort(stored, kind="stable")
        stored, by = stored[order], by[order]
        if ((stored[1:] == stored[:-1]) & (by[1:] != by[:-1])).any():
            raise RuntimeError("two programs of a launch store to one address")
        place = np.searchsorted(stored, loaded)
        place[place == stored.size] = 0
        if ((stored[place] == loaded) & (by[place] != reader)).any():
            raise RuntimeError("a program of a launch loads what another one stores")


@contextmanager
def sanitized() -> Iterator[None]:
    """Check every launch within."""
    before = [getattr(owner, name) for owner, name in _CHANGED]
    load, store, atomic, arguments_of, run = before
    launch = _Launch()

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launch.loaded.append((self.grid_idx, launch.check(self, pointers, mask, "load")))
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.stored.append((self.grid_idx, launch.check(self, pointers, mask, "store")))
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.check(self, pointers, mask, "atomic operation")
        return atomic(self, op, pointers, value, mask, *rest)

    def watched_arguments(self: Any, positional: Any, named: Any) -> Any:
        found = arguments_of(self, positional, named)
        for one in (*found[0], *found[1].values()):
            if hasattr(one, "data_ptr"):
                storage = one.untyped_storage()
                start = storage.data_ptr()
                launch.memory.append((start, start + storage.nbytes()))
        return found

    def watched(self: Any, *positional: Any, **named: Any) -> Any:
        for touched in (launch.memory, launch.stored, launch.loaded):
            touched.clear()
        found = run(self, *positional, **named)
        launch.check_races()
        return found

    new = (checked_load, checked_store, checked_atomic, watched_arguments, watched)
    for (owner, name), function in zip(_CHANGED, new, strict=True):
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in zip(_CHANGED, before, strict=True):
            setattr(owner, name, function)

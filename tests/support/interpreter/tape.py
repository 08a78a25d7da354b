"""A CUDA graph on the CPU: what ran is done again with the same memory, and no code of the host's.

While it records, every operator of PyTorch and every launch of a kernel in Triton's interpreter is
noted, with its arguments: tensors by where they lie, all else by value. Replaying does these again,
in order, into the memory of then. So what a replay gives depends on what lies in memory that stays
and on nothing that the host computes, as a graph's does; fresh memory is filled with NaN, or with
numbers that are no index.

Tensors that are made meanwhile lie in the memory of a pool (`Arena`), which is that of a tensor
before once Python has dropped this. Nothing else is kept alive: a replay that reads memory which
was freed is an error. So is to give the host numbers, or to make tensors of the host's, meanwhile.
"""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from pcg.kernels.torch.host_kernels import replay_calls
from pcg.native_library import NativeFunction, hearing
from tests.support.interpreter.device_tensors import MEMORY, DeviceTensor, on_device
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
_BLOCK = 512
_SEGMENT = 2**21
"""Bytes of a block of torch's allocator, and those that it asks a device for at least."""


class Arena:
    """The memory of a pool of graphs, dealt out as torch does it: to the smallest gap that fits.

    Attributes:
        most_bytes: the most that tensors took at once.
    """

    def __init__(self) -> None:
        self.most_bytes = self._bytes = 0
        self._segments: dict[int, Tensor] = {}
        self._starts: list[int] = []
        self._gaps: dict[int, int] = {}  # the end of each, by its start

    def storage_for(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a storage with the contents of another one, whose memory is the arena's."""
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        start = self._take(size)
        segment = self.segment_at(start)
        assert segment is not None
        offset = start - segment.data_ptr()
        block = segment.numpy()[offset : offset + storage.nbytes()]
        weakref.finalize(block, self._give, start, size).atexit = False
        own = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()  # holds the block alone
        own.copy_(storage)
        return own

    def alias(self, x: Tensor) -> Tensor | None:
        """Return a tensor that lies where one of the arena's does, and does not hold its memory.

        None for a tensor that lies elsewhere.
        """
        address = x.untyped_storage().data_ptr()
        segment = self.segment_at(address)
        if segment is None:
            return None
        dtype, shape, strides, first = _geometry(x)
        first += (address - segment.data_ptr()) // dtype.itemsize
        return _tensor_of(segment.untyped_storage(), (dtype, shape, strides, first))

    def segment_at(self, address: int) -> Tensor | None:
        """Return the bytes around an address, as the device gave them; None if it is not here."""
        place = bisect_right(self._starts, address) - 1
        segment = self._segments[self._starts[place]] if place >= 0 else None
        if segment is None or address >= segment.data_ptr() + segment.nbytes:
            return None
        return segment

    def _take(self, size: int) -> int:
        """Take so many bytes of the smallest gap; returns their address."""
        fitting = [(end - start, start) for start, end in self._gaps.items()]
        fitting = [gap for gap in fitting if gap[0] >= size]
        if not fitting:
            length = max(size, _SEGMENT)
            segment = torch.zeros(length + _BLOCK, dtype=torch.uint8)
            first = -(-segment.data_ptr() // _BLOCK) * _BLOCK
            self._segments[first] = segment
            insort(self._starts, first)
            self._gaps[first] = first + length
            fitting = [(length, first)]
        _, start = min(fitting)
        end = self._gaps.pop(start)
        if start + size < end:
            self._gaps[start + size] = end
        self._bytes += size
        self.most_bytes = max(self.most_bytes, self._bytes)
        return start

    def _give(self, start: int, size: int) -> None:
        """Take a block back, and join it with the gaps beside it."""
        self._bytes -= size
        end = start + size
        if end in self._gaps:
            end = self._gaps.pop(end)
        before = next((low for low, high in self._gaps.items() if high == start), start)
        self._gaps[before] = end


class Tape:
    """A `Recorder`.

    Attributes:
        arena: the memory of what is made while it records.
        pools: those of this recorder and of all that were made apart from it.
    """

    def __init__(self, of: Tape | None = None) -> None:
        self._counts: Counter[str] = Counter() if of is None else of._counts
        self.arena = Arena()
        self.pools: list[Arena] = [] if of is None else of.pools
        self.pools.append(self.arena)

    @property
    def recorded(self) -> int:
        """How often something was recorded, by this one and by those apart from it."""
        return self._counts["recorded"]

    @property
    def replayed(self) -> int:
        """How often something was replayed."""
        return self._counts["replayed"]

    def apart(self) -> Tape:
        return type(self)(self)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function; it is called twice, as for a graph."""
        # Tokens of no one are made of whatever lies in fresh memory.
        with np.errstate(all="ignore"):
            run()
            with noting(self.arena) as notes:
                run()
        self._counts["recorded"] += 1

        def replay() -> None:
            self._counts["replayed"] += 1
            with np.errstate(all="ignore"):
                for again in notes:
                    again()

        return replay


@contextmanager
def noting(arena: Arena) -> Iterator[list[Callable[[], None]]]:
    """Note what runs within, and have what it makes lie in an arena."""
    notes: list[Callable[[], None]] = []

    def hear(function: NativeFunction, call: array[int], keeps: object) -> None:
        notes.append(partial(_call_again, function, call, keeps))

    with _Operators(notes, arena), _launches(notes, arena), hearing(hear):
        yield notes


def _call_again(function: NativeFunction, call: array[int], _keeps: object) -> None:
    replay_calls(array("q", (function.address, call.buffer_info()[0])))


# ----------------------------------------------------------------------------------------- places


def _geometry(x: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()


def _tensor_of(
    storage: torch.UntypedStorage,
    geometry: tuple[torch.dtype, torch.Size, tuple[int, ...], int],
) -> Tensor:
    dtype, shape, strides, offset = geometry
    made = torch.empty(0, dtype=dtype)
    return made.set_(storage, offset, shape, strides)  # type: ignore[call-overload, no-any-return]


class _Place:
    """Where a tensor lies outside of an arena: a graph knows the address, and keeps nothing."""

    def __init__(self, host: Tensor, is_on_device: bool) -> None:
        self._storage = StorageWeakRef(host.untyped_storage())
        self._geometry = _geometry(host)
        self._is_on_device = is_on_device

    def tensor(self) -> Tensor:
        """RuntimeError: nothing lies there any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise RuntimeError(f"a graph runs on memory that was freed, of {self._geometry[:2]}")
        host = _tensor_of(storage, self._geometry)
        return on_device(host) if self._is_on_device else host


def _noted(arena: Arena, x: Any) -> Any:
    """An argument as a graph has it."""
    if not isinstance(x, Tensor) or x.is_mkldnn or not x.numel():
        return x
    is_ours = isinstance(x, DeviceTensor)
    host = x.host if is_ours else x
    alias = arena.alias(host)
    return _Place(host, is_ours) if alias is None else _like(x, alias, arena)


def _like(x: Tensor, made: Tensor, arena: Arena) -> Tensor:
    """A tensor of an arena, on the device if another one is."""
    if not isinstance(x, DeviceTensor):
        return made
    segment = arena.segment_at(made.data_ptr())
    assert segment is not None
    MEMORY.add(segment)  # streams share it as a whole
    return on_device(made)


def _now(x: Any) -> Any:
    """An argument of a graph as its operators take it."""
    return x.tensor() if isinstance(x, _Place) else x


# ------------------------------------------------------------------------------------------ notes


class _Operators(TorchDispatchMode):
    """Notes operators."""

    def __init__(self, notes: list[Callable[[], None]], arena: Arena) -> None:
        super().__init__()
        self._notes = notes
        self._arena = arena

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator in _WAITS:
            raise RuntimeError(f"{operator} waits for the device while a step is recorded")
        found = operator(*args, **kwargs)
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        storages: dict[int, torch.UntypedStorage] = {}

        def own(x: Any) -> Any:
            """A result, in the arena if it is new."""
            if not isinstance(x, Tensor) or _memory(x) in given or x.is_mkldnn or not x.numel():
                return x
            host = x.host if isinstance(x, DeviceTensor) else x
            if _memory(x) not in storages:
                storages[_memory(x)] = self._arena.storage_for(host.untyped_storage())
            made = _tensor_of(storages[_memory(x)], _geometry(host))
            return _like(x, made, self._arena)

        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        fresh = [i for i, x in enumerate(made) if _memory(x) not in given]
        if not fresh and not operator._schema.is_mutable:
            return found  # a view
        noted = tree_map(lambda x: _noted(self._arena, x), (args, kwargs))
        result = tree_map(own, found)
        places = [_noted(self._arena, x) for x in tree_leaves(result) if isinstance(x, Tensor)]
        if operator in EMPTY:
            for i in fresh:
                spoil(places[i])
                self._notes.append(lambda x=places[i]: spoil(x))
            return result

        def again() -> None:
            given, named = tree_map(_now, noted)
            redone = [x for x in tree_leaves(operator(*given, **named)) if isinstance(x, Tensor)]
            for i in fresh:
                places[i].copy_(redone[i])

        self._notes.append(again)
        return result


def _memory(x: Tensor) -> int:
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr()


@contextmanager
def _launches(notes: list[Callable[[], None]], arena: Arena) -> Iterator[None]:
    """Note launches; operators that the interpreter itself calls are not noted."""
    run = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = tree_map(lambda x: _noted(arena, x), (args, kwargs))

        def again() -> None:
            given, named = tree_map(_now, own)
            run(self, *given, **named)

        notes.append(again)
        with torch._C._DisableTorchDispatch():
            return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = run

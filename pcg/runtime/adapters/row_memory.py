"""Rows of LoRA's matrices of the adapters that run, in one memory, each adapter at its true rank.

Row k of A [r, in] and row k of scaled Bᵀ [r, out] lie contiguous wherever there is room. Segmented
kernels find them by tables of their first elements:

    rows   [matrices, slots, most_rank]   A of each output of a site, then B of each, and the bias
    ranks  [matrices, slots]              0 where an adapter has nothing there

A bottleneck adapter's matrices lie so, too, and the bias between them as a matrix of one row.

Over ranks they are those of the rank's pieces, of as many ranks on each (`Cutter.part`).

An adapter takes a slot of the tables and room for its rows before it first runs, and gives them up
when others need them and it does not run (`pcg/runtime/adapters/row_allocator.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from pcg.ir.program.program import python_name
from pcg.kernels.adapter_batch import LoraRows, TokenSpans
from pcg.kernels.sizes import RANK_STEP, ROW_ALIGNMENT
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.copies import Copies
from pcg.runtime.adapters.joined_sites import JoinedSite
from pcg.runtime.adapters.row_allocator import RowAllocator
from pcg.runtime.adapters.stacked_weights import Cutter

_LEAST_SLOTS = 16


@dataclass(frozen=True)
class LoraSite:
    """Linear operators of one input in one layer, or a bottleneck adapter.

    Attributes:
        part: of the model: a layer, or behind the last of them prologue and epilogue.
        layer: of its parameters.
        joined: their LoRA.
    """

    part: int
    layer: int
    joined: JoinedSite

    @property
    def fits_kernels(self) -> bool:
        """Whether they can read its rows, and sum in fp32."""
        modules, places = self.joined.modules, [self.joined.in_size, self.joined.columns]
        places += [place for one in modules for place in (one.column, one.size)]
        is_aligned = not any(place % ROW_ALIGNMENT for place in places)
        return is_aligned and modules[0].a.type.dtype != "f64"

    @property
    def names(self) -> tuple[str, ...]:
        """Attributes that emitted functions read of it."""
        if self.joined.bias is None:
            return (self.joined.name,)
        return tuple(python_name(matrix.name) for matrix in self.joined.matrices)


@dataclass(frozen=True)
class _Place:
    """Of an adapter: its slot of the tables, and the first elements of its matrices' rows."""

    slot: int
    firsts: Sequence[Tensor]


_NO_TOKENS = TokenSpans(())


class RowMemory:
    """The adapters that run, and tables of where their rows lie.

    Args:
        sites: in order.
        cutter: of the adapters' matrices, for the device of the tables.
        room: for the rows.
    """

    def __init__(self, sites: Sequence[LoraSite], cutter: Cutter, room: RowAllocator) -> None:
        self.sites = tuple(sites)
        self._cutter = cutter
        self._device = device = cutter.device
        self._room = room
        self._first: list[int] = []
        matrices = 0
        for site in self.sites:
            self._first.append(matrices)
            matrices += len(site.joined.matrices)
        self._copies = Copies(device)
        self._slots: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        self._running: set[int] = set()
        self._free_slots: list[int] = []
        self._rows = torch.zeros((matrices, 0, RANK_STEP), dtype=torch.int64, device=device)
        self._ranks = torch.zeros((matrices, 0), dtype=torch.int32, device=device)
        self._views: list[LoraRows] = []
        self._views_of: object = None

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return self._room.memory.nbytes

    @property
    def element_bytes(self) -> int:
        """Of the adapters' dtype."""
        return self._room.memory.itemsize

    def slot(self, adapter: Adapter) -> int:
        """Of an adapter that was admitted."""
        return self._slots[id(adapter)]

    def fetch(self, wanted: Sequence[Adapter]) -> bool:
        """Begin to copy adapters that run next into room that nobody who runs needs.

        Args:
            wanted: in the order of their turns; those that there is no room for get none.
        Returns:
            Whether any came, or lost the room that it had.
        """
        moved = self._take_coming()
        kept = self._running | set(map(id, wanted))
        for adapter in wanted:
            key = id(adapter)
            if key in self._coming or self._has(adapter):
                continue
            self._drop(key)
            place = self._place(adapter, kept, grows=False)
            if place is None:
                break
            moved = True
            self._coming[key] = place.slot
            self._copies.begin(key, partial(self._write, adapter, place))
        return moved

    def is_coming(self, adapter: Adapter) -> bool:
        """Whether it is being copied: a step that runs it would wait."""
        return self._copies.is_under_way(id(adapter))

    def close(self) -> None:
        """Write nothing any more."""
        self._copies.wait()

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Have adapters in the memory; others stay as long as nobody needs their room.

        Returns:
            Whether any came.
        """
        self._running = set(map(id, wanted))
        came = self._take_coming()
        new = []
        for adapter in wanted:
            if self._has(adapter):
                # The latest that ran goes to the end.
                self._slots[id(adapter)] = self._slots.pop(id(adapter))
            else:
                self._drop(id(adapter))
                new.append(adapter)
        for adapter in new:
            self._bring(adapter)
        return came or bool(new)

    def forget(self, adapter: Adapter) -> None:
        """Free what an adapter has: it has changed or gone."""
        self._drop(id(adapter))

    def shapes(self, adapter: Adapter) -> list[tuple[int, int]]:
        """Rows of an adapter's matrices, and their elements, in the order of the tables.

        Where these are no multiple of what kernels load at once, they are filled up.
        """
        shapes = []
        for site in self.sites:
            sizes = [site.joined.in_size] * len(site.joined.modules)
            sizes += [one.size for one in site.joined.modules]
            for parameter, size in zip_longest(site.joined.matrices, sizes):
                module, _, kind = parameter.source.format(layer=site.layer).rpartition(".")
                weights = adapter.weights.get(module)
                if weights is not None and kind in weights.served:
                    inner = self._cutter.inner_size(weights.inner_size, parameter)
                    shapes.append((1, _aligned_size(inner)) if size is None else (inner, size))
        return shapes

    @property
    def layout(self) -> object:
        """Where memory and tables lie, and what there is of them."""
        tensors = (self._room.memory, self._rows, self._ranks)
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)

    def bound(self, tokens: TokenSpans) -> list[tuple[LoraSite, LoraRows]]:
        """What emitted functions read at each site."""
        layout = self.layout
        if layout != self._views_of:
            # What kernels know is of tensors that were there before.
            views = map(self._view_at, self.sites, self._first)
            self._views_of, self._views = layout, [*views]
        pairs = zip(self.sites, self._views, strict=True)
        return [(site, replace(view, tokens=tokens)) for site, view in pairs]

    def _view_at(self, site: LoraSite, first: int) -> LoraRows:
        """A site's part of the tables, for no tokens yet."""
        modules = site.joined.modules
        middle, end = first + len(modules), first + 2 * len(modules)
        bias = slice(end, first + len(site.joined.matrices))
        return LoraRows(
            self._room.memory,
            self._rows[first:middle],
            self._rows[middle:end],
            self._ranks[first:middle],
            site.joined.in_size,
            tuple(one.column for one in modules),
            tuple(one.size for one in modules),
            self._rows[bias],
            self._ranks[bias],
            _NO_TOKENS,
            {},
        )

    # ------------------------------------------------------------------------------- an adapter

    def _has(self, adapter: Adapter) -> bool:
        return id(adapter) in self._slots and self._room.holds(adapter)

    def _bring(self, adapter: Adapter) -> None:
        """Copy an adapter now."""
        # Memory and tables may move, and nobody writes to them meanwhile.
        self._take_coming(wait=True)
        place = self._place(adapter, self._running, grows=True)
        assert place is not None
        self._write(adapter, place)
        self._slots[id(adapter)] = place.slot

    def _place(self, adapter: Adapter, kept: set[int], *, grows: bool) -> _Place | None:
        """Room for an adapter in place of others but these; None where there is none."""
        shapes = self.shapes(adapter)
        most = max((rows for rows, _ in shapes), default=0)
        if most > self._rows.shape[2] and not grows:
            return None
        slot = self._free_slot(kept, grows)
        if slot is None:
            return None
        firsts = self._room.reserve(adapter, shapes, lambda: self._drop_idle(kept), grows=grows)
        if firsts is None:
            self._free_slots.append(slot)
            return None
        self._widen(most)
        return _Place(slot, firsts)

    def _write(self, adapter: Adapter, place: _Place) -> bool:
        """Write an adapter's rows, and where they are; on any thread."""
        parts = [
            _aligned(self._cutter.part(adapter, parameter, site.layer))
            for site in self.sites
            for parameter in site.joined.matrices
        ]
        self._room.write(adapter, [part for part in parts if part is not None])
        rows = torch.zeros(self._rows.shape[::2], dtype=torch.int64)
        ranks = torch.zeros(len(parts), dtype=torch.int32)
        firsts = iter(place.firsts)
        for matrix, part in enumerate(parts):
            if part is not None:
                rows[matrix, : len(part)] = next(firsts)
                ranks[matrix] = len(part)
        self._rows[:, place.slot] = rows.to(self._device)
        self._ranks[:, place.slot] = ranks.to(self._device)
        return True

    def _take_coming(self, *, wait: bool = False) -> bool:
        """Take in those whose copies are made, and wait for those that run or for all."""
        came = False
        for key, slot in list(self._coming.items()):
            if wait or key in self._running or not self._copies.is_under_way(key):
                del self._coming[key]
                self._copies.take(key)
                self._slots[key] = slot
                came = True
        return came

    def _drop(self, key: int) -> None:
        slot = self._coming.pop(key, None)
        if slot is None:
            slot = self._slots.pop(key, None)
        else:
            self._copies.take(key)
        if slot is not None:
            self._room.drop(key)
            self._free_slots.append(slot)

    def _drop_idle(self, kept: set[int]) -> bool:
        """Drop who ran last the longest ago but these; False where there is nobody else."""
        key = next((key for key in self._slots if key not in kept), None)
        if key is None:
            return False
        self._drop(key)
        return True

    def _free_slot(self, kept: set[int], grows: bool) -> int | None:
        if not self._free_slots and not self._drop_idle(kept):
            if not grows:
                return None
            count = self._rows.shape[1]
            more = max(count, _LEAST_SLOTS)
            self._rows = torch.nn.functional.pad(self._rows, (0, 0, 0, more))
            self._ranks = torch.nn.functional.pad(self._ranks, (0, more))
            self._free_slots += reversed(range(count, count + more))
        return self._free_slots.pop()

    def _widen(self, rank: int) -> None:
        """Have the tables take a rank."""
        most = self._rows.shape[2]
        if rank > most:
            more = -(-rank // RANK_STEP) * RANK_STEP - most
            self._rows = torch.nn.functional.pad(self._rows, (0, more))


def _aligned(part: Tensor | None) -> Tensor | None:
    """A matrix whose rows are filled up to a multiple of what kernels load at once."""
    if part is None or _aligned_size(part.shape[1]) == part.shape[1]:
        return part
    return torch.nn.functional.pad(part, (0, _aligned_size(part.shape[1]) - part.shape[1]))


def _aligned_size(size: int) -> int:
    """Elements of a row of so many, with those that it is filled up with."""
    return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT

"""Padded tables: the adapters of a batch in stacks for emitted programs.

A running adapter has a slot: its weights at a site are in a stack with the weights of all adapters
of its width. Ranks above 8 are padded to at most twice their size; ranks above 64 are not padded,
and have separate stacks while they have pages. Sequences are ordered by width and slot, sequences
without an adapter first, so that each adapter's tokens form a segment, and the product runs segment
by segment (SGMV: Punica §4). Adapters of the next requests are copied from host memory on a
separate thread and stream, concurrently with steps.

Over ranks, an adapter is whole in host memory, and a rank's stacks hold shards, which are cut after
padding, so that the shards of all adapters align. All adapters then have the same width, because
collectives run between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.kernels.batch import Segments
from pcg.kernels.devices import device_pool, stream_for
from pcg.peft.adapter import Adapter
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.runtime.adapters.sites import GraphSites
from pcg.runtime.adapters.stacked_weights import (
    ServedWeights,
    StackedWeight,
    WeightStacker,
    stack_sites,
)
from pcg.runtime.memory.pool import PageTable


class AdapterCopies:
    """Copies by adapter id, which run in sequence on a separate thread.

    On a GPU, copies run on a separate stream, which first waits for the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = device_pool(device, 1, "pcg copies")
        self._stream = stream_for("copies", device) if device.type == "cuda" else None
        self._under_way: dict[int, Future[bool]] = {}

    def begin(self, key: int, copy: Callable[[], bool]) -> None:
        """Start a copy of an adapter by id, into memory without other readers or writers."""
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._stream.device).record_event()
        self._under_way[key] = self._thread.submit(self._make, copy, before)

    def is_under_way(self, key: int) -> bool:
        """Return True if a copy has started and not finished."""
        copy = self._under_way.get(key)
        return copy is not None and not copy.done()

    def take(self, key: int) -> bool:
        """Wait for a copy and remove it; return True if the copy succeeded.

        An adapter that does not fit, or failed to copy, is copied again when it runs, so that the
        error is raised for its requests instead of this caller.
        """
        copy = self._under_way.pop(key)
        return copy.exception() is None and copy.result()

    def wait(self) -> None:
        wait(self._under_way.values())

    def reset(self) -> None:
        """Wait for all copies, and remove them."""
        self.wait()
        self._under_way.clear()

    def _make(self, copy: Callable[[], bool], before: torch.cuda.Event | None) -> bool:
        # Gradient mode and inference mode are set per thread.
        with torch.no_grad():
            if self._stream is None:
                return copy()
            with torch.cuda.stream(self._stream):
                if before is not None:
                    self._stream.wait_event(before)
                fits = copy()
                self._stream.synchronize()
            return fits


_LEAST_SLOTS = 4
_SPARE_SLOTS = 2
"""Number of slots for adapters that run next, and maximum of free slots between used slots."""


@dataclass
class _Growth:
    adapter: Adapter
    slots: list[Adapter | None]
    stacks: list[dict[str, StackedWeight]] = field(default_factory=list)


class AdapterSlots:
    """Keeps running adapters in slots of stacked weights.

    Adapters that run together have adjacent slots from the first slot on, because a product reads
    all slots between them. A new adapter replaces an adapter that does not run; when adapters leave
    without new ones, the last adapters move up. Stacks also grow in the background: larger stacks
    with the current adapters and a new adapter replace the old stacks when complete.
    """

    def __init__(
        self,
        sites: Sequence[tuple[GraphSites, int]],
        stacker: WeightStacker,
        copies: AdapterCopies,
        *,
        is_lone: bool = False,
    ) -> None:
        """Create empty stacks; `is_lone` limits the stacks to a slot for a single adapter."""
        self._least, self._spare = (1, 0) if is_lone else (_LEAST_SLOTS, _SPARE_SLOTS)
        self._growth: _Growth | None = None
        # Adapters that do not fit into the current slots, and into larger stacks either.
        self._unfit: set[int] = set()
        self._failed: set[int] = set()
        self._sites = sites
        self._stacker = stacker
        self._copies = copies
        self._slots: list[Adapter | None] = []
        self.places: dict[int, int] = {}
        self._copying: dict[int, int] = {}
        self._running: set[int] = set()
        self._stacks: list[dict[str, StackedWeight]] = []

    @property
    def is_growing(self) -> bool:
        """True while larger stacks are being created."""
        growth = self._growth
        return growth is not None and self._copies.is_under_way(growth.adapter.version)

    @property
    def size_bytes(self) -> int:
        """Bytes of the stacks, including empty slots and padding."""
        return sum(stack.size_bytes for stacks in self._stacks for stack in stacks.values())

    def prefetch(self, wanted: Sequence[Adapter]) -> bool:
        """Start copying adapters that run next, in order, into slots of adapters that do not run.

        Returns:
            True if an adapter got or lost a slot.
        """
        moved = self._finish_copies()
        kept = self._running | self._copying.keys() | {other.version for other in wanted}
        room = min(len(self._slots), len(self._running) + self._spare)
        for adapter in wanted:
            key = adapter.version
            if key in self.places or key in self._copying or key in self._failed:
                continue
            if self._growth is not None:
                break
            if key in self._unfit:
                self._grow(adapter)
                break
            free = (
                p
                for p in range(room)
                if (other := self._slots[p]) is None or other.version not in kept
            )
            place = next(free, None)
            if place is None:
                if room == len(self._slots):
                    self._grow(adapter)
                break
            moved |= self._clear(place)
            self._slots[place], self._copying[key] = adapter, place
            self._copies.begin(key, partial(self._put, adapter, place))
        return moved

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Give slots to distinct running adapters; return True if an adapter got a new slot."""
        self._running = {adapter.version for adapter in wanted}
        came = self._finish_copies()
        placed = [(adapter, self.places.get(adapter.version)) for adapter in wanted]
        taken = {place for _, place in placed if place is not None}
        coming = set(self._copying.values())
        free = (p for p in range(len(wanted) + len(coming)) if p not in taken | coming)
        moves = [(adapter, next(free)) for adapter, place in placed if place is None]
        taken.update(place for _, place in moves)
        # Moving adapters pays only for many unused slots between running adapters.
        near = len(wanted) + _SPARE_SLOTS
        if near <= max(taken) < 2 * len(taken) + min(taken) - 1:
            far = (adapter for adapter, place in placed if place is not None and place >= near)
            moves += zip(far, free, strict=False)
        if moves:
            self._move(moves)
        return came or bool(moves)

    def _finish_copies(self) -> bool:
        came = False
        if self._growth is not None:
            key = self._growth.adapter.version
            if key in self._running or not self._copies.is_under_way(key):
                came = self._finish_growth()
        for key, place in list(self._copying.items()):
            if key in self._running or not self._copies.is_under_way(key):
                del self._copying[key]
                if self._copies.take(key):
                    self.places[key] = place
                    came = True
                else:
                    self._slots[place] = None
                    self._unfit.add(key)
        return came

    def _grow(self, adapter: Adapter) -> None:
        """Start creating larger stacks, with the adapter in the first slot after the others."""
        known = len(self._slots)
        more = self._larger(known + 1) - known
        slots = [*self._slots, adapter, *[None] * (more - 1)]
        growth = self._growth = _Growth(adapter, slots)

        def make() -> bool:
            growth.stacks = self._stacked(slots)
            return True

        self._copies.begin(adapter.version, make)

    def _larger(self, most: int) -> int:
        return max(most + self._spare, 2 * len(self._slots), self._least)

    def _finish_growth(self) -> bool:
        """Install the larger stacks; return True if their creation succeeded."""
        growth, self._growth = self._growth, None
        assert growth is not None
        self._unfit.discard(growth.adapter.version)
        if not self._copies.take(growth.adapter.version):
            self._failed.add(growth.adapter.version)  # the step that runs it will raise the error
            return False
        known = len(self._slots)  # some may have been freed during the growth
        self.places[growth.adapter.version] = known
        self._slots += growth.slots[known:]
        self._stacks = growth.stacks
        return True

    def _stacked(self, slots: Sequence[Adapter | None]) -> list[dict[str, StackedWeight]]:
        return [stack_sites(sites, slots, layer, self._stacker) for sites, layer in self._sites]

    def _move(self, moves: Sequence[tuple[Adapter, int]]) -> None:
        if self._growth is not None:  # the larger stacks would lack moved adapters
            self._copies.take(self._growth.adapter.version)
            self._growth = None
        known = len(self._slots)
        most = 1 + max(place for _, place in moves)
        if most > known:
            self._slots += [None] * (self._larger(most) - known)
        for adapter, place in moves:
            self.forget(adapter)
            self._clear(place)
            self._slots[place], self.places[adapter.version] = adapter, place
        fit = len(self._slots) == known and all(
            self._put(adapter, place) for adapter, place in moves
        )
        if not fit:
            # The new stacks hold all slots, including slots with pending copies.
            for key, place in self._copying.items():
                if self._copies.take(key):
                    self.places[key] = place
                else:
                    self._slots[place] = None
            self._copying.clear()
            self._stacks = self._stacked(self._slots)

    def _put(self, adapter: Adapter, place: int) -> bool:
        return all(
            stack.put(place, adapter, layer, self._stacker)
            for stacks, (_, layer) in zip(self._stacks, self._sites, strict=True)
            for stack in stacks.values()
        )

    def _clear(self, place: int) -> bool:
        gone = self._slots[place]
        return gone is not None and self.forget(gone)

    def forget(self, adapter: Adapter) -> bool:
        if self._growth is not None and self._growth.adapter is adapter:
            self._copies.take(adapter.version)
            self._growth = None
        self._unfit.discard(adapter.version)
        self._failed.discard(adapter.version)
        coming = self._copying.pop(adapter.version, None)
        if coming is not None:
            self._copies.take(adapter.version)
            self._slots[coming] = None
        place = self.places.pop(adapter.version, None)
        if place is not None:
            self._slots[place] = None
        return place is not None

    def bound(self, slots: slice, segments: Segments) -> list[dict[str, object]]:
        """Return the program's weights at each site, by attribute."""
        return [
            {name: stack.bound(slots, segments) for name, stack in stacks.items()}
            for stacks in self._stacks
        ]


class Namespace(SimpleNamespace):
    """Attributes by site; None for a site without an adapter in the batch."""

    def __getattr__(self, name: str) -> None:
        return None


NO_ADAPTERS = Namespace()


@dataclass(frozen=True, eq=False)
class BoundAdapters:
    """The adapters of a batch for emitted functions: of outer graphs and layers."""

    outer: object
    layers: Sequence[object]


class PaddedTables:
    """Keeps running adapters in stacks."""

    def __init__(
        self,
        model: ModelGraph,
        weights: ServedWeights,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
        *,
        lora_dtype: torch.dtype | None = None,
    ) -> None:
        """Create empty tables; LoRA stacks have `lora_dtype`, by default the adapters' dtype."""
        self._stacker = WeightStacker(weights, device, ranks, lora_dtype)
        self._device = device
        self._has_widths = ranks.size == 1
        self._copies = AdapterCopies(device)
        self._none = BoundAdapters(NO_ADAPTERS, (NO_ADAPTERS,) * len(model.layers))
        blocks = [self._sites_of(block) for block in model.blocks]
        self._sites = [(blocks[block], layer) for layer, block in enumerate(model.layers)]
        self._sites += [(self._sites_of(model.prologue), 0), (self._sites_of(model.epilogue), 0)]
        self._of_epilogue = GraphSites.of(model.epilogue)
        self._by_width: dict[int, AdapterSlots] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._bound: dict[object, BoundAdapters] = {}
        self._ordered: tuple[_Versions, list[int]] = (), []
        self._stacks_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies of adapters, and of their index tables."""
        return self._stacks_bytes

    @property
    def beside_pool_bytes(self) -> int:
        """Bytes outside the pages of an engine's cache; for any thread."""
        return self.size_bytes

    def _sites_of(self, graph: Graph) -> GraphSites:
        return GraphSites.of(graph)

    def in_pages(self, pages: Tensor | None, table: Callable[[Adapter], PageTable]) -> PaddedTables:
        """Return tables for an engine that gives each adapter pages of its cache by `table`.

        Stacks have separate memory, so this returns the tables themselves.
        """
        return self

    def pages_of(self, adapter: Adapter, page_bytes: int) -> int:
        """Return the number of pages of an adapter."""
        size_bytes = adapter.size_bytes
        dtype = self._stacker.lora_dtype
        if dtype is not None and adapter.rank > _MOST_WIDTH:  # it has only its own copy
            size_bytes = sum(t.numel() * max(t.itemsize, dtype.itemsize) for t in adapter.tensors)
        return -(-size_bytes // page_bytes)

    def pack(self, adapter: Adapter) -> None:
        """Prepare an adapter's image in host memory, for copies to the device; thread-safe.

        Stacks need no image, as they are written from the adapter's own tensors.
        """

    def carry(self, adapter: Adapter, after: Adapter) -> None:
        """Keep the prepared image for another version of the same tensors."""

    @torch.inference_mode(False)
    def prefetch(self, adapters: Sequence[Adapter]) -> None:
        """Start copying adapters that run soon, in the background, while there is room.

        Over ranks, adapters are copied when they run, as ranks would have to agree on copies.
        """
        if not self._has_widths:
            return
        by_width: dict[int, list[Adapter]] = {}
        for adapter in adapters:
            by_width.setdefault(self._width(adapter), []).append(adapter)
        for width, some in by_width.items():
            if self._slots_of(width).prefetch(some):
                self._update_places()

    def is_copying(self, adapter: Adapter) -> bool:
        """Return True during an adapter's copy, for which a step with the adapter would wait."""
        if adapter.version in self._places or self._copies.is_under_way(adapter.version):
            return self._copies.is_under_way(adapter.version)
        slots = self._by_width.get(self._width(adapter))
        return slots is not None and slots.is_growing

    @torch.inference_mode(False)
    def order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """Give a batch's adapters slots, and return the order of its sequences, by index.

        Slots are written again later, so this runs outside inference mode.
        """
        # Most steps run the same adapters as the previous step.
        key = _versions(adapters)
        if key != self._ordered[0]:
            self._ordered = key, self._order(adapters)
        return self._ordered[1]

    def _order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        by_width: dict[int, list[Adapter]] = {}
        wanted = {each.version: each for each in adapters if each is not None}
        for key, adapter in wanted.items():
            place = self._places.get(key)
            width = self._width(adapter) if place is None else place[0]
            by_width.setdefault(width, []).append(adapter)
        for width, some in by_width.items():
            if self._slots_of(width).admit(some):
                self._update_places()
        # Comparing one int per sequence is faster than comparing its adapter's pair.
        in_order = sorted(wanted, key=self._places.__getitem__)
        turns = {key: turn for turn, key in enumerate(in_order)}
        turn_of = [-1 if each is None else turns[each.version] for each in adapters]
        return sorted(range(len(adapters)), key=turn_of.__getitem__)

    def _slots_of(self, width: int) -> AdapterSlots:
        if width not in self._by_width:
            shared = (self._sites, self._stacker, self._copies)
            self._by_width[width] = AdapterSlots(*shared, is_lone=width < 0)
        return self._by_width[width]

    def _update_places(self) -> None:
        """Drop bound stacks, and look up the width and the slot of each adapter again."""
        self._bound.clear()
        self._ordered = (), []
        self._stacks_bytes = sum(slots.size_bytes for slots in self._by_width.values())
        self._places = {
            key: (width, place)
            for width, slots in self._by_width.items()
            for key, place in slots.places.items()
        }

    def _width(self, adapter: Adapter) -> int:
        """Return the width of an adapter's slots: its rank, rounded up to a power of two.

        A wide adapter has a slot of its own; its width is a unique negative number.
        """
        rank = adapter.rank
        if not rank or not self._has_widths:
            return 0
        if rank > _MOST_WIDTH:
            return -adapter.version
        return max(1 << (rank - 1).bit_length(), _LEAST_WIDTH)

    def bind(self, adapters: Sequence[Adapter | None], sizes: Sequence[int]) -> BoundAdapters:
        """Bind the adapters of sequences of these sizes in tokens, in the order of `order`."""
        if not any(adapters):
            return self._none
        key = _versions(adapters), tuple(sizes)
        if key not in self._bound:
            if len(self._bound) == _BOUND:
                self._bound.clear()
            self._bound[key] = self._bind(*_merge(adapters, sizes))
        return self._bound[key]

    def bind_epilogue(self, adapters: Sequence[Adapter | None]) -> BoundAdapters:
        """Bind the adapters of tokens, in the order of `order`, for the epilogue only."""
        if not (self._of_epilogue.joined or self._of_epilogue.single):
            return self._none
        return self.bind(adapters, [1] * len(adapters))

    def _bind(self, start: int, chosen: Sequence[Adapter], merged: Sequence[int]) -> BoundAdapters:
        sizes_by_width: dict[int, dict[int, int]] = {}
        for adapter, size in zip(chosen, merged, strict=True):
            width, place = self._places[adapter.version]
            sizes_by_width.setdefault(width, {})[place] = size
        by_width = []
        for width, by_place in sizes_by_width.items():
            slots = slice(min(by_place), max(by_place) + 1)
            sizes = [by_place.get(place, 0) for place in range(slots.start, slots.stop)]
            segments = Segments.of(start, sizes, self._device)
            by_width.append(self._by_width[width].bound(slots, segments))
            start = segments.stop
        *layers, prologue, epilogue = map(_joined, zip(*by_width, strict=True))
        return BoundAdapters(
            Namespace(**(prologue | epilogue)), [Namespace(**layer) for layer in layers]
        )

    def close(self) -> None:
        """Wait for copies, and write nothing afterwards, as another program serves."""
        self._copies.wait()

    def reset(self) -> None:
        """Free all slots, which a failed call may have left inconsistent."""
        self._copies.reset()
        self._by_width = {}
        self._update_places()

    def evict(self, adapter: Adapter) -> None:
        """Release the slot of a wide adapter without pages."""
        slots = self._by_width.pop(-adapter.version, None)
        if slots is not None:
            slots.forget(adapter)
            self._update_places()

    def forget(self, adapter: Adapter) -> None:
        """Drop an adapter that has changed or is gone; its weights are read again if it runs."""
        if any(slots.forget(adapter) for slots in self._by_width.values()):
            self._update_places()
        PaddedTables.evict(self, adapter)


_MOST_WIDTH = 64
"""The maximum rank in shared stacks, as larger products do not gain from several adapters."""
_LEAST_WIDTH = 8
"""The minimum width: padding smaller ranks costs less than more products."""


def _joined(by_width: Sequence[Mapping[str, object]]) -> dict[str, object]:
    if len(by_width) == 1:
        return dict(by_width[0])
    names = by_width[0]
    every = {name: tuple(of_width[name] for of_width in by_width) for name in names}
    return {name: parts if any(parts) else None for name, parts in every.items()}


_BOUND = 8
"""Number of batches with cached bound stacks, until adapters change slots."""


_Versions: TypeAlias = tuple[int, ...]


def _versions(adapters: Sequence[Adapter | None]) -> _Versions:
    """Return the version of each adapter; 0 for None."""
    return tuple([0 if adapter is None else adapter.version for adapter in adapters])


def _merge(
    adapters: Sequence[Adapter | None], sizes: Sequence[int]
) -> tuple[int, list[Adapter], list[int]]:
    """Return the tokens without an adapter, the adapters in order, and the tokens of each."""
    start = 0
    chosen: list[Adapter] = []
    merged: list[int] = []
    for adapter, size in zip(adapters, sizes, strict=True):
        if adapter is None:
            start += size
        elif chosen and chosen[-1] is adapter:
            merged[-1] += size
        else:
            chosen.append(adapter)
            merged.append(size)
    return start, chosen, merged

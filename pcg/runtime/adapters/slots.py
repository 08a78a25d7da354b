"""Slots: places for the adapters of one width in stacks of their weights.

Adapters are copied from host memory on a thread and a stream of their own, concurrently with the
steps of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from pcg.kernels.batch import Segments
from pcg.kernels.devices import device_pool, stream_for
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.sites import GraphSites
from pcg.runtime.adapters.stacked_weights import StackedWeight, WeightStacker, stack_sites


class AdapterCopies:
    """Copies that run one after the other on a thread of their own, by the adapter's id.

    On a GPU they run on their own stream, which first waits for the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = device_pool(device, 1, "pcg copies")
        self._stream = stream_for("copies", device) if device.type == "cuda" else None
        self._under_way: dict[int, Future[bool]] = {}

    def begin(self, key: int, copy: Callable[[], bool]) -> None:
        """Begin a copy of an adapter, by its id, into memory that nothing else reads or writes."""
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._stream.device).record_event()
        self._under_way[key] = self._thread.submit(self._make, copy, before)

    def is_under_way(self, key: int) -> bool:
        """Return True if a copy began and has not finished."""
        copy = self._under_way.get(key)
        return copy is not None and not copy.done()

    def take(self, key: int) -> bool:
        """Wait for a copy and forget it; return True if it succeeded.

        If the adapter does not fit, or the copy failed, it is copied again when it runs: then the
        error belongs to the requests for it, and not to the caller that waits for the copy.
        """
        copy = self._under_way.pop(key)
        return copy.exception() is None and copy.result()

    def wait(self) -> None:
        wait(self._under_way.values())

    def reset(self) -> None:
        """Wait for all copies, and forget them."""
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
"""Slots for adapters that run next, and the most free slots between those that run."""


@dataclass
class _Growth:
    adapter: Adapter
    slots: list[Adapter | None]
    stacks: list[dict[str, StackedWeight]] = field(default_factory=list)


class AdapterSlots:
    """Keeps running adapters in slots of stacked weights.

    Adapters that run together lie side by side from the first slot on, because a product reads all
    slots between them. A newcomer replaces an adapter that does not run; if adapters have left and
    none came, the last ones move up. Stacks also grow in the background: larger stacks are made of
    the present adapters and one more, and replace the old ones when they are complete.
    """

    def __init__(
        self,
        sites: Sequence[tuple[GraphSites, int]],
        stacker: WeightStacker,
        copies: AdapterCopies,
        *,
        is_lone: bool = False,
    ) -> None:
        """Create no slots yet; with `is_lone` there is one slot, for one adapter."""
        self._least, self._spare = (1, 0) if is_lone else (_LEAST_SLOTS, _SPARE_SLOTS)
        self._growth: _Growth | None = None
        # Those that fit into no slot as it is, and those that fit into no larger stacks either.
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
        """True while larger stacks are made."""
        growth = self._growth
        return growth is not None and self._copies.is_under_way(growth.adapter.version)

    @property
    def size_bytes(self) -> int:
        """Bytes of the stacks, empty slots and padding included."""
        return sum(stack.size_bytes for stacks in self._stacks for stack in stacks.values())

    def prefetch(self, wanted: Sequence[Adapter]) -> bool:
        """Begin to copy adapters that run next, in turn, into slots that no running adapter needs.

        Returns:
            True if any adapter got or lost a slot.
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
        """Give slots to distinct adapters that run; return True if any got a new slot."""
        self._running = {adapter.version for adapter in wanted}
        came = self._finish_copies()
        placed = [(adapter, self.places.get(adapter.version)) for adapter in wanted]
        taken = {place for _, place in placed if place is not None}
        coming = set(self._copying.values())
        free = (p for p in range(len(wanted) + len(coming)) if p not in taken | coming)
        moves = [(adapter, next(free)) for adapter, place in placed if place is None]
        taken.update(place for _, place in moves)
        # Copying pays only if the slots between the running ones are many.
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
        """Begin to make larger stacks, with the adapter in the first slot behind the others."""
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
        """Install the larger stacks; return True if they could be made."""
        growth, self._growth = self._growth, None
        assert growth is not None
        self._unfit.discard(growth.adapter.version)
        if not self._copies.take(growth.adapter.version):
            self._failed.add(growth.adapter.version)  # the step that runs it will say why
            return False
        known = len(self._slots)  # of which some may have been freed meanwhile
        self.places[growth.adapter.version] = known
        self._slots += growth.slots[known:]
        self._stacks = growth.stacks
        return True

    def _stacked(self, slots: Sequence[Adapter | None]) -> list[dict[str, StackedWeight]]:
        return [stack_sites(sites, slots, layer, self._stacker) for sites, layer in self._sites]

    def _move(self, moves: Sequence[tuple[Adapter, int]]) -> None:
        if self._growth is not None:  # what moves would not be in the larger stacks
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
            # The new stacks hold all slots, those of adapters that are being copied included.
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
        """Return the weights that the program reads at each site, by attribute."""
        return [
            {name: stack.bound(slots, segments) for name, stack in stacks.items()}
            for stacks in self._stacks
        ]

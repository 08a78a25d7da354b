"""Slots for adapters of one width, and the stacks of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pcg.kernels.adapter_batch import Segments
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.copies import Copies
from pcg.runtime.adapters.stacked_weights import Cutter, Sites, Stack

_LEAST_SLOTS = 4
_SPARE_SLOTS = 2
"""For adapters that run next; those that run may lie so many slots apart, which products read."""


class Shelf:
    """Keeps adapters that run in slots.

    Those that run together lie side by side from the first slot on, as a product reads whatever
    lies between them, too. Who comes is written over one that does not run; where some have gone
    and nobody came, the last move up.

    Args:
        sites: of each part of the model, and its layer.
        cutter: makes the stacks.
        copies: that are made beside steps.

    Attributes:
        places: the slot of each adapter that has one, by the adapter's id.
    """

    def __init__(self, sites: Sequence[tuple[Sites, int]], cutter: Cutter, copies: Copies) -> None:
        self._sites = sites
        self._cutter = cutter
        self._copies = copies
        self._slots: list[Adapter | None] = []
        self.places: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        self._running: set[int] = set()
        self._stacks: list[dict[str, Stack]] = []

    def fetch(self, wanted: Sequence[Adapter]) -> bool:
        """Begin to copy adapters that run next into slots that nobody who runs needs.

        Args:
            wanted: in the order of their turns; those that there is no slot for get none.
        Returns:
            Whether any came, or lost the slot that it had.
        """
        moved = self._take_coming()
        kept = self._running | self._coming.keys() | set(map(id, wanted))
        room = min(len(self._slots), len(self._running) + _SPARE_SLOTS)
        for adapter in wanted:
            key = id(adapter)
            if key in self.places or key in self._coming:
                continue
            free = (
                p for p in range(room) if (one := self._slots[p]) is None or id(one) not in kept
            )
            place = next(free, None)
            if place is None:
                break
            moved |= self._clear(place)
            self._slots[place], self._coming[key] = adapter, place
            self._copies.begin(key, partial(self._put, adapter, place))
        return moved

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Give adapters slots; returns whether any got one.

        Args:
            wanted: those that run, each once.
        """
        self._running = set(map(id, wanted))
        came = self._take_coming()
        found = [(one, self.places.get(id(one))) for one in wanted]
        taken = {place for _, place in found if place is not None}
        coming = set(self._coming.values())
        free = (p for p in range(len(wanted) + len(coming)) if p not in taken | coming)
        moves = [(one, next(free)) for one, place in found if place is None]
        taken.update(place for _, place in moves)
        # A few that run without the others, as prompts may, are not worth a copy.
        near = len(wanted) + _SPARE_SLOTS
        if near <= max(taken) < 2 * len(taken) + min(taken) - 1:
            far = (one for one, place in found if place is not None and place >= near)
            moves += zip(far, free, strict=False)
        if moves:
            self._move(moves)
        return came or bool(moves)

    def _take_coming(self) -> bool:
        """Take in those whose copies are made, and wait for those that run; whether any came."""
        came = False
        for key, place in list(self._coming.items()):
            if key in self._running or not self._copies.is_under_way(key):
                del self._coming[key]
                if self._copies.take(key):
                    self.places[key] = place
                    came = True
                else:
                    self._slots[place] = None
        return came

    def _move(self, moves: Sequence[tuple[Adapter, int]]) -> None:
        known = len(self._slots)
        most = 1 + max(place for _, place in moves)
        if most > known:
            more = max(most + _SPARE_SLOTS, 2 * known, _LEAST_SLOTS) - known
            self._slots += [None] * more
        for adapter, place in moves:
            self.forget(adapter)
            self._clear(place)
            self._slots[place], self.places[id(adapter)] = adapter, place
        fit = len(self._slots) == known and all(
            self._put(adapter, place) for adapter, place in moves
        )
        if not fit:
            # Stacks of another size: who is on its way is among the slots, and is written again.
            for key, place in self._coming.items():
                self._copies.take(key)
                self.places[key] = place
            self._coming.clear()
            self._stacks = [
                sites.stacks(self._slots, layer, self._cutter) for sites, layer in self._sites
            ]

    def _put(self, adapter: Adapter, place: int) -> bool:
        """Write an adapter's weights into a slot of all stacks; False where they do not fit."""
        return all(
            stack.put(place, adapter, layer, self._cutter)
            for stacks, (_, layer) in zip(self._stacks, self._sites, strict=True)
            for stack in stacks.values()
        )

    def _clear(self, place: int) -> bool:
        """Free a slot; returns whether an adapter had it."""
        gone = self._slots[place]
        return gone is not None and self.forget(gone)

    def forget(self, adapter: Adapter) -> bool:
        """Free an adapter's slot; returns whether it had one."""
        coming = self._coming.pop(id(adapter), None)
        if coming is not None:
            self._copies.take(id(adapter))
            self._slots[coming] = None
        place = self.places.pop(id(adapter), None)
        if place is not None:
            self._slots[place] = None
        return place is not None

    def bound(self, slots: slice, segments: Segments) -> list[dict[str, object]]:
        """What the program reads by attribute, for each of the sites."""
        return [
            {name: stack.bound(slots, segments) for name, stack in stacks.items()}
            for stacks in self._stacks
        ]

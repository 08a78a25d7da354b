"""Slots for adapters of one width, and the stacks of their weights."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.runtime.adapter_segments import Segments
from pcg.runtime.adapter_stack import Cutter, Sites, Stack
from pcg.runtime.adapters import Adapter


class Shelf:
    """Keeps adapters that run in slots.

    Those that run together lie side by side from the first slot on, as a product reads whatever
    lies between them, too. Who comes is written over one that does not run; where one has gone and
    nobody came, the last moves up.

    Args:
        sites: of each part of the model, and its layer.
        cutter: makes the stacks.

    Attributes:
        places: the slot of each adapter that has one, by the adapter's id.
    """

    def __init__(self, sites: Sequence[tuple[Sites, int]], cutter: Cutter) -> None:
        self._sites = sites
        self._cutter = cutter
        self._slots: list[Adapter | None] = []
        self.places: dict[int, int] = {}
        self._stacks: list[dict[str, Stack]] = []

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Give adapters slots; returns whether any got one.

        Args:
            wanted: those that run, each once.
        """
        found = [(one, self.places.get(id(one))) for one in wanted]
        taken = {place for _, place in found if place is not None}
        free = (place for place in range(len(wanted)) if place not in taken)
        moves = [(one, next(free)) for one, place in found if place is None]
        taken.update(place for _, place in moves)
        # A few that run without the others, as prompts may, are not worth a copy.
        if len(wanted) <= max(taken) < 2 * len(taken) + min(taken) - 1:
            far = (one for one, place in found if place is not None and place >= len(wanted))
            moves += zip(far, free, strict=True)
        if moves:
            self._move(moves)
        return bool(moves)

    def _move(self, moves: Sequence[tuple[Adapter, int]]) -> None:
        known = len(self._slots)
        most = 1 + max(place for _, place in moves)
        if most > known:
            self._slots += [None] * (max(most, 2 * known, _LEAST_SLOTS) - known)
        for adapter, place in moves:
            self.forget(adapter)
            gone = self._slots[place]
            if gone is not None:
                self.forget(gone)
            self._slots[place], self.places[id(adapter)] = adapter, place
        fit = len(self._slots) == known and all(
            stack.put(place, adapter, layer, self._cutter)
            for adapter, place in moves
            for stacks, (_, layer) in zip(self._stacks, self._sites, strict=True)
            for stack in stacks.values()
        )
        if not fit:
            self._stacks = [
                sites.stacks(self._slots, layer, self._cutter) for sites, layer in self._sites
            ]

    def forget(self, adapter: Adapter) -> bool:
        """Free an adapter's slot; returns whether it had one."""
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


_LEAST_SLOTS = 4

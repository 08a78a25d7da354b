"""The adapters of one batch, as the emitted program reads them.

An adapter that runs has a slot: its weights at a site lie in one stack with those of the others,
ranks padded to the largest among them. Sequences are ordered by slot, those without an adapter
first, so each adapter's tokens are one segment, and the product runs segment by segment (SGMV:
Punica §4). An adapter that comes is written into the lowest slot that the batch does not need, so
that a change of the batch costs one adapter's copy, and what runs lies close together.

Over ranks an adapter is whole in memory, and a rank's stacks are of its pieces. They are cut after
padding, so that a part of the ranks of one adapter lies where that of another does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from pcg.ir.program import ModelGraph
from pcg.parallel.ranks import ALONE, Ranks
from pcg.runtime.adapter_segments import segments_of
from pcg.runtime.adapter_stack import Cutter, Sites, Stack
from pcg.runtime.adapters import Adapter
from pcg.runtime.served_weights import ServedWeights


class _NoAdapters:
    """Every site without a weight."""

    def __getattr__(self, name: str) -> None:
        return None


NO_ADAPTERS = _NoAdapters()


@dataclass(frozen=True)
class Bound:
    """What emitted functions read as `a`: of the prologue and epilogue, and of each layer."""

    outer: object
    layers: Sequence[object]


class AdapterStacks:
    """Keeps the adapters that run in stacks.

    Args:
        model: that reads them.
        weights: of the adapters.
        device: of the stacks.
        ranks: the group.
    """

    def __init__(
        self,
        model: ModelGraph,
        weights: ServedWeights,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self._cutter = Cutter(weights, device, ranks)
        self._device = device
        self._none = Bound(NO_ADAPTERS, (NO_ADAPTERS,) * len(model.layers))
        blocks = [Sites.of(block) for block in model.blocks]
        self._sites = [(blocks[block], layer) for layer, block in enumerate(model.layers)]
        self._sites += [(Sites.of(model.prologue), 0), (Sites.of(model.epilogue), 0)]
        self._slots: list[Adapter | None] = []
        self._places: dict[int, int] = {}
        self._stacks: list[dict[str, Stack]] = []
        self._bound: dict[object, Bound] = {}

    def order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """The order in which the sequences of a batch run, by index; gives adapters slots.

        Args:
            adapters: of each sequence.
        """
        wanted = {id(adapter): adapter for adapter in adapters if adapter is not None}
        self._place(list(wanted.values()))
        places = [-1 if one is None else self._places[id(one)] for one in adapters]
        return sorted(range(len(adapters)), key=places.__getitem__)

    def bind(self, adapters: Sequence[Adapter | None], sizes: Sequence[int]) -> Bound:
        """Bind the adapters of a batch.

        Args:
            adapters: of each sequence, in `order`.
            sizes: tokens of each sequence.
        """
        start, chosen, merged = _merge(adapters, sizes)
        if not chosen:
            return self._none
        key = (tuple(map(id, chosen)), start, tuple(merged))
        if key not in self._bound:
            if len(self._bound) == _BOUND:
                self._bound.clear()
            self._bound[key] = self._bind(start, chosen, merged)
        return self._bound[key]

    def _bind(self, start: int, chosen: Sequence[Adapter], merged: Sequence[int]) -> Bound:
        places = [self._places[id(adapter)] for adapter in chosen]
        slots = slice(places[0], places[-1] + 1)
        sizes = [0] * (slots.stop - slots.start)
        for place, size in zip(places, merged, strict=True):
            sizes[place - slots.start] = size
        segments = segments_of(start, sizes, self._device)
        *layers, prologue, epilogue = (
            {name: stack.bound(slots, segments) for name, stack in stacks.items()}
            for stacks in self._stacks
        )
        return Bound(_Namespace(prologue | epilogue), [_Namespace(layer) for layer in layers])

    def forget(self, adapter: Adapter) -> None:
        """Read an adapter anew when it next runs: it has changed or gone."""
        place = self._places.pop(id(adapter), None)
        if place is not None:
            self._slots[place] = None
            self._bound.clear()

    @torch.inference_mode(False)
    def _place(self, wanted: Sequence[Adapter]) -> None:
        """Give adapters slots, the lowest that none of them has.

        Outside inference mode, whatever the caller's: slots are written over later.
        """
        most = len(wanted) + len(wanted) // 4
        places = [self._places.get(id(one), most) for one in wanted]
        homeless = [one for one, place in zip(wanted, places, strict=True) if place >= most]
        if not homeless:
            return
        self._bound.clear()
        taken = {place for place in places if place < most}
        free = (place for place in range(most) if place not in taken)
        moves = list(zip(homeless, free, strict=False))
        known = len(self._slots)
        if any(place >= known for _, place in moves):
            self._slots += [None] * (max(most, known + known // 2) - known)
        for adapter, place in moves:
            before = self._places.pop(id(adapter), None)
            if before is not None:
                self._slots[before] = None
            gone = self._slots[place]
            if gone is not None:
                del self._places[id(gone)]
            self._slots[place], self._places[id(adapter)] = adapter, place
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


_BOUND = 8
"""Batches of which the bound stacks are kept, while no adapter gets a slot."""


class _Namespace(SimpleNamespace):
    """Attributes by site; a site that no adapter of the batch has is None."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(**values)

    def __getattr__(self, name: str) -> None:
        return None


def _merge(
    adapters: Sequence[Adapter | None], sizes: Sequence[int]
) -> tuple[int, list[Adapter], list[int]]:
    """Tokens without an adapter, the adapters in order, and the tokens of each."""
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

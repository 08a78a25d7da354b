"""The adapters of one batch, as the emitted program reads them.

An adapter that runs has a slot: its weights at a site lie in one stack with those of the others of
its width (`pcg/runtime/adapters/slots.py`), ranks padded to the largest among them: above 8, to
less than twice its own. Sequences are ordered by width and slot, those without an adapter first, so
each adapter's tokens are one segment, and the product runs segment by segment (SGMV: Punica §4).
Adapters of the next requests are copied to slots beside what runs.

Over ranks an adapter is whole in memory, and a rank's stacks are of its pieces. They are cut after
padding, so that a part of the ranks of one adapter lies where that of another does. All adapters
are of one width there, as collectives lie between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.kernels.adapter_batch import Segments
from pcg.parallel.ranks.group import ALONE, Ranks
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.copies import Copies
from pcg.runtime.adapters.served_weights import ServedWeights
from pcg.runtime.adapters.slots import Shelf
from pcg.runtime.adapters.stacked_weights import Cutter, Sites
from pcg.runtime.memory.pool import PageTable


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


class PaddedTables:
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
        self._is_alone = ranks.size == 1
        self._copies = Copies(device)
        self._none = Bound(NO_ADAPTERS, (NO_ADAPTERS,) * len(model.layers))
        blocks = [self._sites_of(block) for block in model.blocks]
        self._sites = [(blocks[block], layer) for layer, block in enumerate(model.layers)]
        self._sites += [(self._sites_of(model.prologue), 0), (self._sites_of(model.epilogue), 0)]
        self._of_epilogue = Sites.of(model.epilogue)
        self._shelves: dict[int, Shelf] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._bound: dict[object, Bound] = {}

    def _sites_of(self, graph: Graph) -> Sites:
        """What of a graph's adapters lies in stacks."""
        return Sites.of(graph)

    def in_pages(self, pages: Tensor | None, table: Callable[[Adapter], PageTable]) -> PaddedTables:
        """The same where an engine gives adapters pages of its cache.

        Args:
            pages: memory of the cache, [pages, bytes of one]; None where it is not one of pages.
            table: an adapter's pages.
        Returns:
            Itself, as stacks are memory of their own.
        """
        return self

    def pages_of(self, adapter: Adapter, page_bytes: int) -> int:
        """Pages of a cache that an adapter takes."""
        return -(-adapter.size_bytes // page_bytes)

    @torch.inference_mode(False)
    def fetch(self, adapters: Sequence[Adapter]) -> None:
        """Begin to copy adapters that run soon, as far as there is room, beside what runs now.

        Over ranks, who would have to agree on what is copied, they are copied when they run.

        Args:
            adapters: in the order of their turns.
        """
        if not self._is_alone:
            return
        by_width: dict[int, list[Adapter]] = {}
        for adapter in adapters:
            by_width.setdefault(self._width(adapter), []).append(adapter)
        for width, some in by_width.items():
            if width in self._shelves and self._shelves[width].fetch(some):
                self._have_moved()

    def is_coming(self, adapter: Adapter) -> bool:
        """Whether an adapter is being copied: a step that runs it would wait."""
        return self._copies.is_under_way(id(adapter))

    @torch.inference_mode(False)
    def order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """The order in which the sequences of a batch run, by index; gives adapters slots.

        Outside inference mode, whatever the caller's: slots are written over later.

        Args:
            adapters: of each sequence.
        """
        by_width: dict[int, list[Adapter]] = {}
        wanted = {id(one): one for one in adapters if one is not None}
        for key, adapter in wanted.items():
            place = self._places.get(key)
            width = self._width(adapter) if place is None else place[0]
            by_width.setdefault(width, []).append(adapter)
        for width, some in by_width.items():
            if width not in self._shelves:
                self._shelves[width] = Shelf(self._sites, self._cutter, self._copies)
            if self._shelves[width].admit(some):
                self._have_moved()
        # Pairs are compared for each adapter, and for each sequence whole numbers: these are fast.
        in_order = sorted(wanted, key=self._places.__getitem__)
        turns = {key: turn for turn, key in enumerate(in_order)}
        found = [-1 if one is None else turns[id(one)] for one in adapters]
        return sorted(range(len(adapters)), key=found.__getitem__)

    def _have_moved(self) -> None:
        """Drop what was said of slots, and find the width and the slot of each adapter anew."""
        self._bound.clear()
        self._places = {
            key: (width, place)
            for width, shelf in self._shelves.items()
            for key, place in shelf.places.items()
        }

    def _width(self, adapter: Adapter) -> int:
        """Of the shelf for an adapter: its largest rank, rounded up to a power of two."""
        rank = max((weights.rank for weights in adapter.weights.values()), default=0)
        return max(1 << (rank - 1).bit_length(), _LEAST_WIDTH) if rank and self._is_alone else 0

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

    def bind_epilogue(self, adapters: Sequence[Adapter | None]) -> Bound:
        """Bind the adapters of tokens for the epilogue alone.

        Args:
            adapters: of each token, in `order`.
        """
        if not (self._of_epilogue.joined or self._of_epilogue.single):
            return self._none
        return self.bind(adapters, [1] * len(adapters))

    def _bind(self, start: int, chosen: Sequence[Adapter], merged: Sequence[int]) -> Bound:
        found: dict[int, dict[int, int]] = {}
        for adapter, size in zip(chosen, merged, strict=True):
            width, place = self._places[id(adapter)]
            found.setdefault(width, {})[place] = size
        by_width = []
        for width, by_place in found.items():
            slots = slice(min(by_place), max(by_place) + 1)
            sizes = [by_place.get(place, 0) for place in range(slots.start, slots.stop)]
            segments = Segments.of(start, sizes, self._device)
            by_width.append(self._shelves[width].bound(slots, segments))
            start = segments.stop
        *layers, prologue, epilogue = map(_joined, zip(*by_width, strict=True))
        return Bound(Namespace(prologue | epilogue), [Namespace(layer) for layer in layers])

    def close(self) -> None:
        """Write nothing any more: another program serves."""
        self._copies.wait()

    def evict(self, adapter: Adapter) -> None:
        """Hear that an adapter has given its pages up."""

    def forget(self, adapter: Adapter) -> None:
        """Read an adapter anew when it next runs: it has changed or gone."""
        if any(shelf.forget(adapter) for shelf in self._shelves.values()):
            self._have_moved()


_LEAST_WIDTH = 8
"""Adapters of lower ranks run with those of this one, as calls cost more than what is padded."""


def _joined(by_width: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What the program reads of adapters of several widths, by attribute."""
    if len(by_width) == 1:
        return dict(by_width[0])
    names = by_width[0]
    every = {name: tuple(of_width[name] for of_width in by_width) for name in names}
    return {name: found if any(found) else None for name, found in every.items()}


_BOUND = 8
"""Batches of which the bound stacks are kept, while no adapter gets a slot."""


class Namespace(SimpleNamespace):
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

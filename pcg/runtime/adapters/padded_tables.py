"""Padded tables: the adapters of one batch in stacks, as the emitted program reads them.

A running adapter has a slot: its weights at a site lie in one stack with those of the adapters of
its width (`slots.py`). Ranks above 8 are padded to at most twice their size; ranks above 64 are not
padded, and have stacks of their own while they have pages. Sequences are ordered by width and slot,
those without an adapter first, so each adapter's tokens are one segment, and the product runs
segment by segment (SGMV: Punica §4). Adapters of the next requests are copied in the background.

Over ranks an adapter is whole in host memory, and a rank's stacks hold its shards, which are cut
after padding, so that the shards of all adapters align. All adapters have one width then, because
collectives lie between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.kernels.batch import Segments
from pcg.peft.adapter import Adapter
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.runtime.adapters.sites import GraphSites
from pcg.runtime.adapters.slots import AdapterCopies, AdapterSlots
from pcg.runtime.adapters.stacked_weights import ServedWeights, WeightStacker
from pcg.runtime.memory.pool import PageTable


class Namespace(SimpleNamespace):
    """Attributes by site; a site that no adapter of the batch has is None."""

    def __getattr__(self, name: str) -> None:
        return None


NO_ADAPTERS = Namespace()


@dataclass(frozen=True)
class BoundAdapters:
    """The adapters of a batch as emitted functions read them, of outer graphs and layers."""

    outer: object
    layers: Sequence[object]


class PaddedTables:
    """Keeps the adapters that run in stacks."""

    def __init__(
        self,
        model: ModelGraph,
        weights: ServedWeights,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
        *,
        lora_dtype: torch.dtype | None = None,
    ) -> None:
        """Keep none; LoRA will lie in stacks of `lora_dtype`, or of the adapters' own dtype."""
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
        """Bytes of the copies of adapters, and of the tables that index them."""
        return self._stacks_bytes

    @property
    def beside_pool_bytes(self) -> int:
        """Bytes outside the pages of an engine's cache; on any thread."""
        return self.size_bytes

    def _sites_of(self, graph: Graph) -> GraphSites:
        return GraphSites.of(graph)

    def in_pages(self, pages: Tensor | None, table: Callable[[Adapter], PageTable]) -> PaddedTables:
        """Return tables for an engine that gives adapters pages of its cache, each its `table`.

        Stacks have memory of their own, so these are the tables themselves.
        """
        return self

    def pages_of(self, adapter: Adapter, page_bytes: int) -> int:
        """Count the pages of a cache that an adapter takes."""
        size_bytes = adapter.size_bytes
        dtype = self._stacker.lora_dtype
        if dtype is not None and adapter.rank > _MOST_WIDTH:  # its copy is all that it has
            size_bytes = sum(t.numel() * max(t.itemsize, dtype.itemsize) for t in adapter.tensors)
        return -(-size_bytes // page_bytes)

    def pack(self, adapter: Adapter) -> None:
        """Prepare in host memory the image that engines copy when an adapter comes; thread-safe.

        Stacks are written from the adapter's own tensors.
        """

    def carry(self, adapter: Adapter, after: Adapter) -> None:
        """Keep the prepared image for another version of the same tensors."""

    @torch.inference_mode(False)
    def prefetch(self, adapters: Sequence[Adapter]) -> None:
        """Begin to copy adapters that run soon, as far as there is room, in the background.

        Over ranks adapters are copied when they run, as the ranks would have to agree on the
        copies.
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
        """Return True while an adapter is being copied, so that a step that runs it would wait."""
        if adapter.version in self._places or self._copies.is_under_way(adapter.version):
            return self._copies.is_under_way(adapter.version)
        slots = self._by_width.get(self._width(adapter))
        return slots is not None and slots.is_growing

    @torch.inference_mode(False)
    def order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """Give a batch's adapters slots, and return the order of its sequences, by index.

        Slots are written again later, so this runs outside inference mode.
        """
        # Most steps run what the step before them ran.
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
        """Forget bound stacks, and look up the width and the slot of each adapter again."""
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
        """Wait for copies, and write nothing from now on: another program serves."""
        self._copies.wait()

    def reset(self) -> None:
        """Free all slots, also where a failed call left them half changed."""
        self._copies.reset()
        self._by_width = {}
        self._update_places()

    def evict(self, adapter: Adapter) -> None:
        """Release the slot of a wide adapter that has given its pages up."""
        slots = self._by_width.pop(-adapter.version, None)
        if slots is not None:
            slots.forget(adapter)
            self._update_places()

    def forget(self, adapter: Adapter) -> None:
        """Read an adapter's weights again when it next runs: it has changed, or is gone."""
        if any(slots.forget(adapter) for slots in self._by_width.values()):
            self._update_places()
        PaddedTables.evict(self, adapter)


_MOST_WIDTH = 64
"""The greatest rank that shares stacks: a product of more is no faster for several adapters."""
_LEAST_WIDTH = 8
"""The least width: padding lower ranks to it costs less than more products."""


def _joined(by_width: Sequence[Mapping[str, object]]) -> dict[str, object]:
    if len(by_width) == 1:
        return dict(by_width[0])
    names = by_width[0]
    every = {name: tuple(of_width[name] for of_width in by_width) for name in names}
    return {name: parts if any(parts) else None for name, parts in every.items()}


_BOUND = 8
"""Batches whose bound stacks are kept until adapters get other slots."""


_Versions: TypeAlias = tuple[int, ...]


def _versions(adapters: Sequence[Adapter | None]) -> _Versions:
    """Return the version of each adapter; 0, which no adapter has, for none."""
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

"""Ragged tables: the adapters of a batch for Triton programs, with matrices as rows.

Weights that kernels cannot read as rows are in stacks, as in `padded_tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.batch import NO_SLOT, AdapterSlot, TokenSpans
from pcg.kernels.sizes import RANK_STEP
from pcg.peft.adapter import Adapter
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.runtime.adapters.packed_rows import NO_PAGES, RowPacker
from pcg.runtime.adapters.padded_tables import BoundAdapters, Namespace, PaddedTables
from pcg.runtime.adapters.row_memory import (
    OwnRowAllocator,
    PagedRowAllocator,
    RowAllocator,
    RowMemory,
)
from pcg.runtime.adapters.sites import (
    GraphSites,
    JoinedSite,
    bottlenecks_of,
    model_sources,
    served_sources,
)
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.memory.pool import PageTable


class RaggedTables(PaddedTables):
    """Keeps the running adapters as rows; see `PaddedTables`.

    Attributes:
        lora: the rows of the adapters' matrices; None if the program reads no rows.
    """

    def __init__(
        self,
        model: ModelGraph,
        weights: ServedWeights,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
        allocator: Callable[[torch.dtype], RowAllocator] | None = None,
        *,
        lora_dtype: torch.dtype | None = None,
        defers: bool = True,
        packers: dict[int, RowPacker] | None = None,
    ) -> None:
        """Create empty tables.

        Args:
            lora_dtype: the dtype of rows; by default the adapters' dtype.
            defers: False if other ranks read a layer's output, which must then include LoRA.
            packers: packers of the model's other tables, by page size in elements.
        """
        super().__init__(model, weights, device, ranks)
        self._packers: dict[int, RowPacker] = {} if packers is None else packers
        graphs = [(model.blocks[block], layer) for layer, block in enumerate(model.layers)]
        graphs += [(model.prologue, 0), (model.epilogue, 0)]
        sites = [
            site for part, (graph, layer) in enumerate(graphs) for site in _rows(graph, part, layer)
        ]
        self.lora: RowMemory | None = None
        if sites:
            own_dtype: torch.dtype = getattr(torch, TORCH_NAMES[sites[0].modules[0].a.type.dtype])
            dtype = own_dtype if lora_dtype is None else lora_dtype
            rows = OwnRowAllocator(dtype, device) if allocator is None else allocator(dtype)
            self._packer = partial(RowPacker, sites, self._stacker, dtype)
            self.lora = RowMemory(sites, self._packer_of(rows.page_size), rows, device)
        self._model = model
        self._lora_dtype = lora_dtype
        self._defers = defers
        self._in_pages: WeakSet[RaggedTables] = WeakSet()
        in_rows = {
            parameter.source.format(layer=site.layer)
            for site in sites
            for parameter in site.matrices
        }
        prompts = {source for graph, layer in graphs for source in _prompts(graph, layer)}
        self._in_stacks = model_sources(model) - in_rows - prompts
        self._has_rows_alone: WeakKeyDictionary[Adapter, bool] = WeakKeyDictionary()

    def in_pages(self, pages: Tensor | None, table: Callable[[Adapter], PageTable]) -> RaggedTables:
        if pages is None:
            return self
        stacker, allocator = self._stacker, partial(PagedRowAllocator, pages, table)
        tables = RaggedTables(
            self._model,
            stacker.weights,
            stacker.device,
            stacker.ranks,
            allocator,
            lora_dtype=self._lora_dtype,
            defers=self._defers,
            packers=self._packers,
        )
        self._in_pages.add(tables)
        return tables

    def _packer_of(self, page_size: int) -> RowPacker:
        if page_size not in self._packers:
            self._packers[page_size] = self._packer(page_size)
        return self._packers[page_size]

    def pack(self, adapter: Adapter) -> None:
        for page_size, packer in list(self._packers.items()):
            if page_size != NO_PAGES:
                packer.image(adapter)

    def carry(self, adapter: Adapter, after: Adapter) -> None:
        for packer in self._packers.values():
            packer.carry(adapter, after)

    def pages_of(self, adapter: Adapter, page_bytes: int) -> int:
        if self.lora is None:
            return super().pages_of(adapter, page_bytes)
        packer = self._packer_of(page_bytes // self.lora.element_bytes)
        # Each rank holds about its share of the weights that are not rows.
        own_bytes = max((tensor.itemsize for tensor in adapter.tensors), default=0)
        in_rows = packer.layout(adapter).used * own_bytes
        others = max(adapter.size_bytes // self._stacker.ranks.size - in_rows, 0)
        return packer.pages(adapter) + -(-others // page_bytes)

    @property
    def size_bytes(self) -> int:
        rows = 0 if self.lora is None else self.lora.size_bytes
        return super().size_bytes + rows

    @property
    def beside_pool_bytes(self) -> int:
        return self.size_bytes - (0 if self.lora is None else self.lora.pool_bytes)

    def _sites_of(self, graph: Graph) -> GraphSites:
        rows = {name for site in _rows(graph, 0, 0) for name in site.names}
        every = GraphSites.of(graph)
        joined = tuple(joined_site for joined_site in every.joined if joined_site.name not in rows)
        single = tuple((name, parameter) for name, parameter in every.single if name not in rows)
        return GraphSites(joined, single)

    @torch.inference_mode(False)
    def prefetch(self, adapters: Sequence[Adapter]) -> None:
        super().prefetch(adapters)
        if self._has_widths and self.lora is not None and self.lora.prefetch(adapters):
            self._bound.clear()

    def is_copying(self, adapter: Adapter) -> bool:
        of_rows = self.lora is not None and self.lora.is_copying(adapter)
        return of_rows or super().is_copying(adapter)

    def close(self) -> None:
        super().close()
        if self.lora is not None:
            self.lora.close()

    def reset(self) -> None:
        super().reset()
        if self.lora is not None:
            self.lora.reset()

    @torch.inference_mode(False)
    def evict(self, adapter: Adapter) -> None:
        super().evict(adapter)
        if self.lora is not None:
            self.lora.forget(adapter)
            self._bound.clear()

    @torch.inference_mode(False)
    def order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        wanted = list({a.version: a for a in adapters if a is not None}.values())
        if self.lora is not None and self.lora.admit(wanted):
            self._bound.clear()
        return super().order(adapters)

    @torch.inference_mode(False)
    def forget(self, adapter: Adapter) -> None:
        super().forget(adapter)
        self._has_rows_alone.pop(adapter, None)
        if self.lora is not None:
            self.lora.forget(adapter)
            self._bound.clear()
        for rows in self._in_pages:
            rows.forget(adapter)
        for packer in self._packers.values():  # copies that read the image have ended
            packer.forget(adapter)

    def _bind(self, start: int, chosen: Sequence[Adapter], merged: Sequence[int]) -> BoundAdapters:
        bound = super()._bind(start, chosen, merged)
        if self.lora is None:
            return bound
        spans: list[tuple[int, int, AdapterSlot]] = []
        for adapter, size in zip(chosen, merged, strict=True):
            spans.append((start, size, self.lora.slot(adapter)))
            start += size
        self._put_rows(bound, self.lora, TokenSpans(tuple(spans), self._defers))
        return bound

    @staticmethod
    def _put_rows(bound: BoundAdapters, lora: RowMemory, tokens: TokenSpans) -> None:
        for site, rows in lora.bound(tokens):
            part = bound.layers[site.part] if site.part < len(bound.layers) else bound.outer
            for name in site.names:
                setattr(part, name, rows)

    @torch.inference_mode(False)
    def reserve(self, count: int, adapters: Sequence[Adapter]) -> None:
        """Reserve tables for `count` adapters of such ranks, so that the tables do not move."""
        if self.lora is not None:
            self.lora.reserve(count, adapters)
            self._bound.clear()

    def widest(self, adapters: Sequence[Adapter]) -> int:
        """Return the number of entries per matrix for the widest adapter, at least 16."""
        return RANK_STEP if self.lora is None else self.lora.widest(adapters)

    @property
    def layout(self) -> object:
        """The addresses and shapes of the rows' memory and tables."""
        return None if self.lora is None else self.lora.layout

    def slots(self, adapters: Sequence[Adapter | None]) -> list[AdapterSlot] | None:
        """Return the slot of each token's adapter; None if an adapter also needs stacks."""
        slots = []
        for adapter in adapters:
            if adapter is None:
                slots.append(NO_SLOT)
            elif self._is_in_rows(adapter):
                slots.append(NO_SLOT if self.lora is None else self.lora.slot(adapter))
            else:
                return None
        return slots

    def _is_in_rows(self, adapter: Adapter) -> bool:
        """Return True if the program reads only an adapter's rows, apart from virtual tokens."""
        is_in_rows = self._has_rows_alone.get(adapter)
        if is_in_rows is None:
            is_in_rows = self._in_stacks.isdisjoint(served_sources(adapter))
            self._has_rows_alone[adapter] = is_in_rows
        return is_in_rows

    def bind_tiles(self, tiles: object) -> BoundAdapters:
        """Bind only the rows of all adapters; `tiles` holds tokens' slots, if any."""
        if self.lora is None or tiles is None:
            return self._none
        bound = BoundAdapters(Namespace(), [Namespace() for _ in self._model.layers])
        self._put_rows(bound, self.lora, TokenSpans((), self._defers, {"tiles": tiles}))
        return bound


def _prompts(graph: Graph, layer: int) -> list[str]:
    nodes = (node for node in graph.nodes if node.op == "virtual_tokens")
    parameters = graph.parameters_by_name
    return [parameters[node.inputs[1]].source.format(layer=layer) for node in nodes]


def _rows(graph: Graph, part: int, layer: int) -> list[JoinedSite]:
    sites = (*GraphSites.of(graph).joined, *bottlenecks_of(graph))
    return [replace(site, part=part, layer=layer) for site in sites if site.fits_kernels]

"""The adapters of one batch as programs for Triton read them: LoRA as rows, all else in stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program import ModelGraph
from pcg.ir.types import TORCH_NAMES
from pcg.runtime.adapter_batch import AdapterStacks, Bound
from pcg.runtime.adapter_stack import Sites
from pcg.runtime.adapters import Adapter
from pcg.runtime.lora_rows import LoraMemory, LoraSite, TokenSpans, row_shapes
from pcg.runtime.page_pool import PageTable
from pcg.runtime.row_room import OwnRoom, PageRoom, RowRoom, pages_of_rows
from pcg.runtime.served_weights import ServedWeights


class AdapterRows(AdapterStacks):
    """Keeps the adapters that run; see `AdapterStacks`.

    Attributes:
        lora: rows of their matrices; None where the program has no LoRA that kernels can read.
    """

    def __init__(
        self,
        model: ModelGraph,
        weights: ServedWeights,
        device: torch.device,
        room: Callable[[torch.dtype], RowRoom] | None = None,
    ) -> None:
        """Keep none yet.

        Args:
            model: that reads them.
            weights: of the adapters.
            device: of the program.
            room: for rows of a dtype; a memory of their own by default.
        """
        super().__init__(model, weights, device)
        graphs = [(model.blocks[block], layer) for layer, block in enumerate(model.layers)]
        graphs += [(model.prologue, 0), (model.epilogue, 0)]
        sites = [
            site for part, (graph, layer) in enumerate(graphs) for site in _rows(graph, part, layer)
        ]
        self.lora: LoraMemory | None = None
        if sites:
            dtype = getattr(torch, TORCH_NAMES[sites[0].modules[0][0].type.dtype])
            own = OwnRoom(dtype, device) if room is None else room(dtype)
            self.lora = LoraMemory(sites, weights, device, own)
        self._model, self._weights = model, weights
        self._in_pages: WeakSet[AdapterRows] = WeakSet()

    def in_pages(self, pages: Tensor | None, table: Callable[[Adapter], PageTable]) -> AdapterRows:
        if pages is None:
            return self
        made = AdapterRows(
            self._model, self._weights, self._device, partial(PageRoom, pages, table)
        )
        self._in_pages.add(made)
        return made

    def pages_of(self, adapter: Adapter, page_bytes: int) -> int:
        if self.lora is None:
            return super().pages_of(adapter, page_bytes)
        element_bytes = self.lora.element_bytes
        shapes = row_shapes(adapter, self.lora.sites)
        in_rows = sum(rows * size for rows, size in shapes) * element_bytes
        others = max(adapter.size_bytes - in_rows, 0)
        return pages_of_rows(shapes, page_bytes // element_bytes) + -(-others // page_bytes)

    def _sites_of(self, graph: Graph) -> Sites:
        rows = {site.name for site in _rows(graph, 0, 0)}
        every = Sites.of(graph)
        joined = tuple(one for one in every.joined if one[0] not in rows)
        return Sites(joined, every.single)

    @torch.inference_mode(False)
    def order(self, adapters: Sequence[Adapter | None]) -> list[int]:
        wanted = list({id(one): one for one in adapters if one is not None}.values())
        if self.lora is not None and self.lora.admit(wanted):
            self._bound.clear()
        return super().order(adapters)

    def forget(self, adapter: Adapter) -> None:
        super().forget(adapter)
        if self.lora is not None:
            self.lora.forget(adapter)
            self._bound.clear()
        for rows in self._in_pages:
            rows.forget(adapter)

    def _bind(self, start: int, chosen: Sequence[Adapter], merged: Sequence[int]) -> Bound:
        bound = super()._bind(start, chosen, merged)
        if self.lora is None:
            return bound
        spans = []
        for adapter, size in zip(chosen, merged, strict=True):
            spans.append((start, size, self.lora.slot(adapter)))
            start += size
        for site, rows in self.lora.bound(TokenSpans(tuple(spans))):
            part = bound.layers[site.part] if site.part < len(bound.layers) else bound.outer
            setattr(part, site.name, rows)
        return bound


def _rows(graph: Graph, part: int, layer: int) -> list[LoraSite]:
    """The sites of a graph that kernels can read as rows."""
    found = [LoraSite(part, layer, name, modules) for name, modules in Sites.of(graph).joined]
    return [site for site in found if site.is_aligned]

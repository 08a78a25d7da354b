"""The adapters of one batch, as the emitted program reads them.

Sequences are ordered by adapter, those without one first, so each adapter's tokens are one segment.
A site's weights of all adapters in the batch are stacked, ranks padded to the largest among them,
and the product runs segment by segment (SGMV: Punica §4). Stacks are kept while the same adapters
are in the batch, as they are from one decode step to the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.ir.program import ModelGraph, python_name
from pcg.runtime.adapters import Adapter


@dataclass(frozen=True)
class Segments:
    """Which tokens use which adapter.

    Attributes:
        start: tokens before it use none.
        sizes: tokens of each adapter, in the order of the stacks.
        uniform: the size of each segment where all are equal, else 0.
        gather: [adapters, largest size], token of each place of a padded batch; None where padding
            would more than double the work.
        places: where each token is in the padded batch, [tokens from start].
        batched: (adapters, size, -1) where all tokens are in segments of one size, else None.
    """

    start: int
    sizes: tuple[int, ...]
    uniform: int
    gather: Tensor | None
    places: Tensor | None

    @cached_property
    def batched(self) -> tuple[int, int, int] | None:
        uniform = not self.start and self.uniform and len(self.sizes) > 1
        return (len(self.sizes), self.uniform, -1) if uniform else None


@dataclass(frozen=True)
class SegmentedWeight:
    """One site's weights of the batch's adapters.

    Attributes:
        weight: [adapters, in, out], scaled; of a bias [adapters, 1, out]. A's is a transposed view,
            which the CPU's batched product reads faster.
        segments: which tokens use which.
        present: of each adapter, whether it has a weight here; its part of the stack is zeros else.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class AdapterWeight:
    """One adapter's weight for all tokens: A [r, in], B [out, r], or a bias [out]."""

    weight: Tensor
    scale: float = 1.0
    segments: None = None


_Stacks: TypeAlias = dict[str, tuple[Tensor, tuple[bool, ...]]]


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
    """Makes and keeps the stacks of adapters that run together."""

    def __init__(self, model: ModelGraph, kept: int = 4) -> None:
        self._kept = kept
        self._none = Bound(NO_ADAPTERS, (NO_ADAPTERS,) * len(model.layers))
        self._layer_sites = [
            [
                (python_name(p.name), p.source)
                for p in model.blocks[block].parameters
                if p.role == "adapter"
            ]
            for block in model.layers
        ]
        self._outer_sites = [
            (python_name(p.name), p.source)
            for graph in (model.prologue, model.epilogue)
            for p in graph.parameters
            if p.role == "adapter"
        ]
        self._last: tuple[object, Bound] | None = None
        self._stacks: OrderedDict[tuple[int, ...], list[_Stacks]] = OrderedDict()

    def bind(self, adapters: Sequence[Adapter | None], sizes: Sequence[int]) -> Bound:
        """Bind the adapters of a batch.

        Args:
            adapters: of each sequence; those without one first, equal ones together.
            sizes: tokens of each sequence.
        """
        start, chosen, merged = _merge(adapters, sizes)
        if not chosen:
            return self._none
        key = (tuple(map(id, chosen)), start, tuple(merged))
        if self._last is None or self._last[0] != key:
            self._last = (key, self._bind(start, chosen, merged))
        return self._last[1]

    def _bind(self, start: int, chosen: Sequence[Adapter], merged: Sequence[int]) -> Bound:
        stacks = self._stacked(chosen)
        segments = _segments(start, merged, next(iter(chosen[0].weights.values())).a.device)
        namespaces = [
            _Namespace({name: SegmentedWeight(w, segments, p) for name, (w, p) in layer.items()})
            for layer in stacks
        ]
        return Bound(namespaces[-1], namespaces[:-1])

    def forget(self) -> None:
        """Drop the stacks, after an adapter has changed or gone."""
        self._last = None
        self._stacks.clear()

    def _stacked(self, adapters: Sequence[Adapter]) -> list[_Stacks]:
        key = tuple(id(adapter) for adapter in adapters)
        if key not in self._stacks:
            layers = [
                _stack(sites, adapters, layer) for layer, sites in enumerate(self._layer_sites)
            ]
            self._stacks[key] = [*layers, _stack(self._outer_sites, adapters, 0)]
            while len(self._stacks) > self._kept:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return self._stacks[key]


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


def _segments(start: int, sizes: Sequence[int], device: torch.device) -> Segments:
    largest, total = max(sizes), sum(sizes)
    if all(size == largest for size in sizes):
        return Segments(start, tuple(sizes), largest, None, None)
    if largest * len(sizes) > 2 * total:
        return Segments(start, tuple(sizes), 0, None, None)
    gather = torch.zeros(len(sizes), largest, dtype=torch.long)
    places = torch.empty(total, dtype=torch.long)
    first = 0
    for i, size in enumerate(sizes):
        gather[i, :size] = torch.arange(first, first + size)
        places[first : first + size] = torch.arange(i * largest, i * largest + size)
        first += size
    return Segments(start, tuple(sizes), 0, gather.to(device), places.to(device))


def _stack(sites: Sequence[tuple[str, str]], adapters: Sequence[Adapter], layer: int) -> _Stacks:
    """Stacks by attribute name, of the sites that any of the adapters has."""
    stacks: _Stacks = {}
    for name, source in sites:
        path = source.format(layer=layer)
        parts = [_part(adapter, path) for adapter in adapters]
        present = [part for part in parts if part is not None]
        if not present:
            continue
        rows, columns = (max(part.shape[i] for part in present) for i in (0, 1))
        stack = present[0].new_zeros(len(parts), rows, columns)
        for i, part in enumerate(parts):
            if part is not None:
                stack[i, : part.shape[0], : part.shape[1]] = part
        if source.endswith(".lora_A"):
            stack = stack.transpose(1, 2)
        stacks[name] = (stack, tuple(part is not None for part in parts))
    return stacks


def _part(adapter: Adapter, path: str) -> Tensor | None:
    """A [r, in], scaled Bᵀ [r, out], or a bias [1, out]; None where the adapter has none."""
    module, _, kind = path.rpartition(".")
    if kind == "bias":
        bias = adapter.biases.get(module)
        return None if bias is None else bias.unsqueeze(0)
    weights = adapter.weights.get(module)
    if weights is None:
        return None
    return weights.a if kind == "lora_A" else weights.b.t() * weights.scale

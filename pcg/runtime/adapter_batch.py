"""The adapters of one batch, as the emitted program reads them.

Sequences are ordered by adapter, those without one first, so each adapter's tokens are one segment.
A site's weights of all adapters in the batch are stacked, ranks padded to the largest among them,
and the product runs segment by segment (SGMV: Punica §4). Stacks are kept while the same adapters
are in the batch, as they are from one decode step to the next.

Over ranks an adapter is whole in memory, and a rank's stacks are of its pieces. They are cut after
padding, so that a part of the ranks of one adapter lies where that of another does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program import ModelGraph, python_name
from pcg.parallel.ranks import ALONE, Ranks
from pcg.runtime.adapters import Adapter
from pcg.runtime.pieces import open_dims, piece_of_stack
from pcg.runtime.served_weights import ServedWeights


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
        present: of each adapter, whether it has a weight here; its part of the stack is zeros else,
            or ones where the program scales by it.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class JoinedLora:
    """The LoRA of the batch's adapters at linear operators of one input.

    Attributes:
        a: [adapters, in, ranks], the ranks of all outputs one behind the other.
        b: for each output, [adapters, rank, out], scaled; empty where joined.
        joined_b: [adapters, ranks, outs], each output's in its own rows and columns; None where
            that would read more zeros than the calls it saves are worth.
        ranks: of each output.
        segments: which tokens use which adapter.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    joined_b: Tensor | None
    ranks: list[int]
    segments: Segments


_Stacks: TypeAlias = dict[str, Callable[[Segments], object]]


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
    """Makes and keeps the stacks of adapters that run together.

    Args:
        model: that reads them.
        weights: of the adapters.
        device: of the stacks.
        ranks: the group.
        kept: how many sets of adapters to keep the stacks of.
    """

    def __init__(
        self,
        model: ModelGraph,
        weights: ServedWeights,
        device: torch.device,
        ranks: Ranks = ALONE,
        kept: int = 4,
    ) -> None:
        self._cutter = _Cutter(weights, device, ranks)
        self._device = device
        self._kept = kept
        self._none = Bound(NO_ADAPTERS, (NO_ADAPTERS,) * len(model.layers))
        blocks = [_Sites.of(block) for block in model.blocks]
        self._layers = [blocks[block] for block in model.layers]
        self._outer = (_Sites.of(model.prologue), _Sites.of(model.epilogue))
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
        segments = _segments(start, merged, self._device)
        namespaces = [
            _Namespace({name: make(segments) for name, make in layer.items()}) for layer in stacks
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
                sites.stack(adapters, layer, self._cutter)
                for layer, sites in enumerate(self._layers)
            ]
            prologue, epilogue = (sites.stack(adapters, 0, self._cutter) for sites in self._outer)
            self._stacks[key] = [*layers, prologue | epilogue]
            while len(self._stacks) > self._kept:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return self._stacks[key]


@dataclass(frozen=True)
class _Sites:
    """What a graph reads of adapters.

    Attributes:
        joined: for each lora_linear operator, the attribute that holds all of it, and for each of
            its outputs A, B and the output's size.
        single: attribute of every other adapter parameter.
    """

    joined: tuple[tuple[str, tuple[_Lora, ...]], ...]
    single: tuple[tuple[str, Parameter], ...]

    @classmethod
    def of(cls, graph: Graph) -> _Sites:
        parameters = graph.parameters_by_name
        joined, names = [], set[str]()
        for node in graph.nodes:
            if node.op == "lora_linear":
                count = len(node.outputs)
                read = node.inputs[-2 * count :]
                names.update(read)
                modules = tuple(
                    (parameters[a], parameters[b], value.type.features[0])
                    for a, b, value in zip(read[:count], read[count:], node.outputs, strict=True)
                )
                joined.append((python_name(read[0]), modules))
        single = tuple(
            (python_name(p.name), p)
            for p in graph.parameters
            if p.role == "adapter" and p.name not in names
        )
        return cls(tuple(joined), single)

    def stack(self, adapters: Sequence[Adapter], layer: int, cutter: _Cutter) -> _Stacks:
        """What a layer's attributes are, but for the segments; sites without adapters stay out."""
        stacks: _Stacks = {}
        for name, parameter in self.single:
            stack, present = cutter.stack(adapters, parameter, layer)
            if stack is not None:
                if parameter.source.endswith((".lora_A", "_adapter_down")):
                    stack = stack.transpose(1, 2)
                stacks[name] = partial(_segmented, stack, present)
        for name, modules in self.joined:
            made = _join(adapters, modules, layer, cutter)
            if made is not None:
                stacks[name] = made
        return stacks


_Lora: TypeAlias = tuple[Parameter, Parameter, int]


@dataclass(frozen=True)
class _Cutter:
    """Stacks adapters' weights, and cuts what this rank holds out of the stacks."""

    weights: ServedWeights
    device: torch.device
    ranks: Ranks

    def stack(
        self, adapters: Sequence[Adapter], parameter: Parameter, layer: int
    ) -> tuple[Tensor | None, tuple[bool, ...]]:
        """[adapters, …], and which adapters have one; None where none has."""
        path = parameter.source.format(layer=layer)
        parts = [self.weights.part(adapter, path) for adapter in adapters]
        multiples = [1, 1]
        for dim in open_dims(parameter):
            multiples[dim] = self.ranks.size
        stack = _padded(parts, _absent(parameter.source), multiples)
        present = tuple(part is not None for part in parts)
        if stack is None:
            return None, present
        piece = piece_of_stack(stack, parameter, self.ranks)
        # A piece by itself, so that the stack of whole weights goes.
        return (piece.contiguous() if piece is not stack else stack).to(self.device), present


def _segmented(weight: Tensor, present: tuple[bool, ...], segments: Segments) -> SegmentedWeight:
    return SegmentedWeight(weight, segments, present)


JOINED_BYTES = 2**20
"""Up to about here a joined B, zeros included, is read whole from the cache; beyond, its parts."""


def _join(
    adapters: Sequence[Adapter], modules: Sequence[_Lora], layer: int, cutter: _Cutter
) -> Callable[[Segments], JoinedLora] | None:
    """The LoRA of several modules of one input; None where no adapter has any of them."""
    a_parts = [cutter.stack(adapters, a, layer)[0] for a, _, _ in modules]
    b_parts = [cutter.stack(adapters, b, layer)[0] for _, b, _ in modules]
    present = [a for a in a_parts if a is not None]
    if not present:
        return None
    count, _, in_ = present[0].shape
    a = [present[0].new_zeros(count, 0, in_) if part is None else part for part in a_parts]
    b = [
        present[0].new_zeros(count, 0, out) if part is None else part
        for part, (_, _, out) in zip(b_parts, modules, strict=True)
    ]
    ranks = [part.shape[1] for part in a]
    outs = [out for _, _, out in modules]
    joined = None
    if len(modules) == 1:
        joined = b[0]
    elif count * sum(ranks) * sum(outs) * b[0].element_size() <= JOINED_BYTES:
        joined = b[0].new_zeros(count, sum(ranks), sum(outs))
        row = column = 0
        for part, rank, out in zip(b, ranks, outs, strict=True):
            joined[:, row : row + rank, column : column + out] = part
            row, column = row + rank, column + out
    whole_a = torch.cat(a, 1).transpose(1, 2)
    rest = () if joined is not None else tuple(b)
    return lambda segments: JoinedLora(whole_a, rest, joined, ranks, segments)


SCALES = ("ia3_l", "ia3_l_in", "lora_factor")
"""Vectors that a program multiplies by; without an adapter's own, by one."""


def _absent(source: str) -> float:
    """What stands for the weight of an adapter without one, and changes nothing."""
    return 1.0 if source.endswith(SCALES) else 0.0


def _padded(
    parts: Sequence[Tensor | None], absent: float, multiples: Sequence[int]
) -> Tensor | None:
    """The parts stacked, `absent` for missing rows, columns, parts; None where all are missing.

    There are multiples of these numbers of rows and columns.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    rows, columns = (
        -(-max(part.shape[i] for part in present) // multiple) * multiple
        for i, multiple in enumerate(multiples)
    )
    stack = present[0].new_full((len(parts), rows, columns), absent)
    for i, part in enumerate(parts):
        if part is not None:
            stack[i, : part.shape[0], : part.shape[1]] = part
    return stack


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

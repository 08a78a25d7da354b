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
from functools import cached_property
from types import SimpleNamespace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program import ModelGraph, python_name
from pcg.parallel.ranks import ALONE, Ranks
from pcg.runtime.adapters import Adapter
from pcg.runtime.pieces import open_dims, parted_dim, piece_of_stack
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
        self._cutter = _Cutter(weights, device, ranks)
        self._device = device
        self._none = Bound(NO_ADAPTERS, (NO_ADAPTERS,) * len(model.layers))
        blocks = [_Sites.of(block) for block in model.blocks]
        self._sites = [(blocks[block], layer) for layer, block in enumerate(model.layers)]
        self._sites += [(_Sites.of(model.prologue), 0), (_Sites.of(model.epilogue), 0)]
        self._slots: list[Adapter | None] = []
        self._places: dict[int, int] = {}
        self._stacks: list[dict[str, _Stack]] = []
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
        segments = _segments(start, sizes, self._device)
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
        there = {self._places[id(one)] for one in wanted if id(one) in self._places}
        most = len(wanted) + len(wanted) // 4
        far = {place for place in there if place >= most}
        homeless = [one for one in wanted if self._places.get(id(one), most) >= most]
        if not homeless:
            return
        self._bound.clear()
        taken = there - far
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

    def stacks(
        self, adapters: Sequence[Adapter | None], layer: int, cutter: _Cutter
    ) -> dict[str, _Stack]:
        """What a layer's attributes are, but for the segments."""
        stacks: dict[str, _Stack] = {}
        for name, parameter in self.single:
            stacks[name] = _SingleStack(adapters, parameter, layer, cutter)
        for name, modules in self.joined:
            stacks[name] = _JoinedStack(adapters, modules, layer, cutter)
        return stacks


_Lora: TypeAlias = tuple[Parameter, Parameter, int]
"""A and B of a module, and its outputs."""


@dataclass(frozen=True)
class _Cutter:
    """Stacks adapters' weights, and cuts what this rank holds out of the stacks."""

    weights: ServedWeights
    device: torch.device
    ranks: Ranks

    def stack(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        least: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor | None, list[bool]]:
        """[adapters, …], and which adapters have one; None where none has.

        Args:
            adapters: in order; None for a slot that nobody has.
            parameter: of the program.
            layer: of the model.
            least: rows and columns of the whole weights, at least.
        """
        path = parameter.source.format(layer=layer)
        parts = [None if one is None else self.weights.part(one, path) for one in adapters]
        present = [part is not None for part in parts]
        multiples = [1, 1]
        for dim in open_dims(parameter):
            multiples[dim] = self.ranks.size
        stack = _padded(parts, _absent(parameter.source), multiples, least)
        if stack is None:
            return None, present
        piece = piece_of_stack(stack, parameter, self.ranks)
        # A piece by itself, so that the stack of whole weights goes.
        return (piece.contiguous() if piece is not stack else stack).to(self.device), present

    def whole_of(self, stack: Tensor | None, parameter: Parameter) -> tuple[int, int]:
        """Rows and columns of whole weights, of dims that are as large as adapters have them.

        Args:
            stack: of pieces; None where there is none yet.
            parameter: whose pieces they are.
        """
        least = [0, 0]
        if stack is not None:
            for dim in open_dims(parameter):
                is_parted = dim == parted_dim(parameter)
                least[dim] = stack.shape[dim] * (self.ranks.size if is_parted else 1)
        return least[0], least[1]


class _Stack(Protocol):
    """The weights of all slots at one attribute of a layer."""

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: _Cutter) -> bool:
        """Write an adapter's into a slot; False where there is no room for it."""

    def bound(self, slots: slice, segments: Segments) -> object:
        """What the program reads; None where no adapter has any."""


class _SingleStack:
    """Of one parameter."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        cutter: _Cutter,
    ) -> None:
        self._parameter = parameter
        self._stack, self._present = cutter.stack(adapters, parameter, layer)
        self._turned = parameter.source.endswith((".lora_A", "_adapter_down"))

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: _Cutter) -> bool:
        least = cutter.whole_of(self._stack, self._parameter)
        part, (is_there,) = cutter.stack([adapter], self._parameter, layer, least)
        fits = _write(self._stack, slot, part, _absent(self._parameter.source))
        if fits:
            self._present[slot] = is_there
        return fits

    def bound(self, slots: slice, segments: Segments) -> SegmentedWeight | None:
        if self._stack is None or not any(self._present[slots]):
            return None
        weight = self._stack[slots]
        weight = weight.transpose(1, 2) if self._turned else weight
        return SegmentedWeight(weight, segments, tuple(self._present[slots]))


JOINED_BYTES = 2**20
"""Up to about here a joined B, zeros included, is read whole from the cache; beyond, its parts."""


class _JoinedStack:
    """The LoRA of several modules of one input: A one below the other, B joined or each its own."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        modules: Sequence[_Lora],
        layer: int,
        cutter: _Cutter,
    ) -> None:
        self._modules = modules
        parts = [
            (cutter.stack(adapters, a, layer), cutter.stack(adapters, b, layer))
            for a, b, _ in modules
        ]
        self._present = [
            any(found[slot] for (_, found), _ in parts) for slot in range(len(adapters))
        ]
        there = [a for (a, _), _ in parts if a is not None]
        self._a: Tensor | None = None
        if not there:
            return
        count, _, in_ = there[0].shape
        a = [there[0].new_zeros(count, 0, in_) if x is None else x for (x, _), _ in parts]
        b = [
            there[0].new_zeros(count, 0, out) if x is None else x
            for (_, (x, _)), (_, _, out) in zip(parts, modules, strict=True)
        ]
        self._ranks = [part.shape[1] for part in a]
        self._outs = [out for _, _, out in modules]
        self._a = torch.cat(a, 1)
        size = count * sum(self._ranks) * sum(self._outs) * b[0].element_size()
        self._is_joined = len(modules) == 1 or size <= JOINED_BYTES
        if self._is_joined:
            whole = b[0].new_zeros(count, sum(self._ranks), sum(self._outs))
            for view, part in zip(self._blocks(whole), b, strict=True):
                view.copy_(part)
            self._b = [whole]
        else:
            self._b = b

    def _blocks(self, whole: Tensor) -> list[Tensor]:
        """Each module's rows and columns of the joined B."""
        blocks = []
        row = column = 0
        for rank, out in zip(self._ranks, self._outs, strict=True):
            blocks.append(whole[:, row : row + rank, column : column + out])
            row, column = row + rank, column + out
        return blocks

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: _Cutter) -> bool:
        is_there = False
        a = None if self._a is None else self._a.split(self._ranks, 1)
        b = [] if a is None else self._blocks(self._b[0]) if self._is_joined else self._b
        for index, (of_a, of_b, _) in enumerate(self._modules):
            own_a = None if a is None else a[index]
            own_b = None if a is None else b[index]
            for stack, parameter in ((own_a, of_a), (own_b, of_b)):
                least = cutter.whole_of(stack, parameter)
                part, (has,) = cutter.stack([adapter], parameter, layer, least)
                is_there |= has
                if not _write(stack, slot, part, 0.0):
                    return False
        self._present[slot] = is_there
        return True

    def bound(self, slots: slice, segments: Segments) -> JoinedLora | None:
        if self._a is None or not any(self._present[slots]):
            return None
        b = [part[slots] for part in self._b]
        joined, rest = (b[0], ()) if self._is_joined else (None, tuple(b))
        return JoinedLora(self._a[slots].transpose(1, 2), rest, joined, self._ranks, segments)


def _write(stack: Tensor | None, slot: int, part: Tensor | None, absent: float) -> bool:
    """Write an adapter's part, or what stands for none, into a slot; False: there is no room."""
    if stack is None:
        return part is None
    if part is None:
        stack[slot].fill_(absent)
        return True
    if part.shape[1:] != stack.shape[1:]:
        return False
    stack[slot].copy_(part[0])
    return True


SCALES = ("ia3_l", "ia3_l_in", "lora_factor")
"""Vectors that a program multiplies by; without an adapter's own, by one."""


def _absent(source: str) -> float:
    """What stands for the weight of an adapter without one, and changes nothing."""
    return 1.0 if source.endswith(SCALES) else 0.0


def _padded(
    parts: Sequence[Tensor | None],
    absent: float,
    multiples: Sequence[int],
    least: Sequence[int],
) -> Tensor | None:
    """The parts stacked, `absent` for missing rows, columns, parts; None where all are missing.

    There are multiples of these numbers of rows and columns, and at least so many.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    rows, columns = (
        -(-max(least[i], *(part.shape[i] for part in present)) // multiple) * multiple
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

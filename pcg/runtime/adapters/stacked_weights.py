"""Stacks: the weights of all slots at one attribute of a layer, padded to the largest.

A matrix lies in a stack so that what one output is made of lies together, A as [rank, in] and B as
[out, rank]: so the CPU's products of one token by each matrix read twice as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program.program import python_name
from pcg.parallel.ranks.group import Ranks
from pcg.parallel.ranks.shards import TRANSPOSED, is_piece, open_dims, parted_dim, piece_of_stack
from pcg.peft.adapters import Adapter
from pcg.runtime.adapters.joined_sites import JoinedSite, Lora
from pcg.runtime.adapters.segments import JoinedLora, LoraRun, SegmentedWeight, Segments
from pcg.runtime.adapters.served_weights import ServedWeights


@dataclass(frozen=True)
class Sites:
    """What a graph reads of adapters.

    Attributes:
        joined: of each lora_linear operator.
        single: attribute of every other adapter parameter.
    """

    joined: tuple[JoinedSite, ...]
    single: tuple[tuple[str, Parameter], ...]

    @classmethod
    def of(cls, graph: Graph) -> Sites:
        parameters = graph.parameters_by_name
        joined, names = [], set[str]()
        for node in graph.nodes:
            if node.op == "lora_linear":
                joined.append(JoinedSite.of(node, parameters))
                names.update(matrix.name for matrix in joined[-1].matrices)
        single = tuple(
            (python_name(p.name), p)
            for p in graph.parameters
            if p.role == "adapter" and p.name not in names
        )
        return cls(tuple(joined), single)

    def stacks(
        self, adapters: Sequence[Adapter | None], layer: int, cutter: Cutter
    ) -> dict[str, Stack]:
        """What a layer's attributes are, but for the segments."""
        stacks: dict[str, Stack] = {}
        for name, parameter in self.single:
            stacks[name] = _SingleStack(adapters, parameter, layer, cutter)
        for one in self.joined:
            stacks[one.name] = _JoinedStack(adapters, one.modules, layer, cutter)
        return stacks


@dataclass(frozen=True)
class Cutter:
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
        stack = self._cut(parts, parameter, least)
        return None if stack is None else stack.to(self.device), [one is not None for one in parts]

    def _cut(
        self, parts: Sequence[Tensor | None], parameter: Parameter, least: Sequence[int]
    ) -> Tensor | None:
        """The parts stacked, of which this rank has its piece alone."""
        multiples = [1, 1]
        for dim in open_dims(parameter):
            multiples[dim] = self.ranks.size
        stack = _padded(parts, _absent(parameter.source), multiples, least)
        if stack is None:
            return None
        piece = piece_of_stack(stack, parameter, self.ranks)
        # A piece by itself, so that the stack of whole weights goes.
        return piece.contiguous() if piece is not stack else stack

    def part(self, adapter: Adapter, parameter: Parameter, layer: int) -> Tensor | None:
        """An adapter's matrix or vector; over ranks this rank's piece, cut after it was padded.

        Args:
            adapter: whose part it is.
            parameter: of the program.
            layer: of the model.
        """
        part = self.weights.part(adapter, parameter.source.format(layer=layer))
        if part is None or self.ranks.size == 1:
            return part
        stack = self._cut([part], parameter, (0, 0))
        return None if stack is None else stack[0]

    def inner_size(self, size: int, parameter: Parameter) -> int:
        """Of what `part` gives of an adapter whose rank, or width of a bottleneck, is this one."""
        size = -(-size // self.ranks.size) * self.ranks.size
        is_parted = parted_dim(parameter) in open_dims(parameter)
        return size // self.ranks.size if is_parted else size

    def write(self, view: Tensor | None, adapter: Adapter, parameter: Parameter, layer: int) -> Has:
        """Write an adapter's part, or what stands for none, into its place in a stack.

        Args:
            view: rows and columns of the place; None where there is no stack yet.
            adapter: whose part it is.
            parameter: of the program.
            layer: of the model.
        Returns:
            Whether there is a part; None where there is no room for it.
        """
        if is_piece(parameter):
            least = self._whole_of(view, parameter)
            stack, (has,) = self.stack([adapter], parameter, layer, least)
            part = None if stack is None else stack[0]
        else:
            part = self.weights.part(adapter, parameter.source.format(layer=layer))
            has = part is not None
        if view is None:
            return False if part is None else None
        if part is None:
            view.fill_(_absent(parameter.source))
            return has
        rows, columns = part.shape
        if rows > view.shape[0] or columns > view.shape[1]:
            return None
        if part.shape != view.shape:
            view.fill_(_absent(parameter.source))
        view[:rows, :columns].copy_(part)
        return has

    def _whole_of(self, view: Tensor | None, parameter: Parameter) -> tuple[int, int]:
        """Rows and columns of whole weights, of dims that are as large as adapters have them.

        Args:
            view: of a piece; None where there is no stack yet.
            parameter: whose piece it is.
        """
        least = [0, 0]
        if view is not None:
            for dim in open_dims(parameter):
                is_parted = dim == parted_dim(parameter)
                least[dim] = view.shape[dim] * (self.ranks.size if is_parted else 1)
        return least[0], least[1]


Has: TypeAlias = bool | None
"""Whether an adapter has a weight somewhere; None where there is no room for it."""


class Stack(Protocol):
    """The weights of all slots at one attribute of a layer."""

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: Cutter) -> bool:
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
        cutter: Cutter,
    ) -> None:
        self._parameter = parameter
        self._stack, self._present = cutter.stack(adapters, parameter, layer)
        if self._stack is not None and parameter.source.endswith(TRANSPOSED):
            self._stack = _turned(self._stack)
        self._is_a = parameter.source.endswith((".lora_A", "_adapter_down"))

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: Cutter) -> bool:
        view = None if self._stack is None else self._stack[slot]
        has = cutter.write(view, adapter, self._parameter, layer)
        self._present[slot] = bool(has)
        return has is not None

    def bound(self, slots: slice, segments: Segments) -> SegmentedWeight | None:
        if self._stack is None or not any(self._present[slots]):
            return None
        weight = self._stack[slots]
        weight = weight.transpose(1, 2) if self._is_a else weight
        return SegmentedWeight(weight, segments, tuple(self._present[slots]))


JOINED_BYTES = 2**20
"""Up to about here a joined B, zeros included, is read whole from the cache; beyond, its parts."""


class _JoinedStack:
    """The LoRA of several modules of one input: A one below the other, B of like ones together."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        modules: Sequence[Lora],
        layer: int,
        cutter: Cutter,
    ) -> None:
        self._modules = modules
        parts = [
            (cutter.stack(adapters, one.a, layer), cutter.stack(adapters, one.b, layer))
            for one in modules
        ]
        self._column = modules[0].column
        self._columns = modules[-1].column + modules[-1].size - self._column
        self._present = [
            any(found[slot] for (_, found), _ in parts) for slot in range(len(adapters))
        ]
        there = [a for (a, _), _ in parts if a is not None]
        self._a: Tensor | None = None
        self._cut: dict[tuple[int, int], tuple[Tensor, _LoraRuns, _LoraRuns]] = {}
        if not there:
            return
        count, _, in_ = there[0].shape
        a = [there[0].new_zeros(count, 0, in_) if x is None else x for (x, _), _ in parts]
        self._ranks = [part.shape[1] for part in a]
        self._a = torch.cat(a, 1)
        size = count * sum(self._ranks) * self._columns * self._a.element_size()
        if len(modules) == 1 or size <= JOINED_BYTES:
            self._runs = [_Run(0, 0, 1, self._columns, sum(self._ranks))]
        else:
            self._runs = _runs(self._ranks, modules)
        self._b = [there[0].new_zeros(count, run.count, run.out, run.rank) for run in self._runs]
        for view, (_, (b, _)) in zip(self._views(), parts, strict=True):
            if view is not None and b is not None:
                view.copy_(b)

    def _views(self) -> list[Tensor | None]:
        """Each module's B in all slots, [slots, rank, out]; None of those without any."""
        views: list[Tensor | None] = []
        row = 0
        for rank, one in zip(self._ranks, self._modules, strict=True):
            view = None
            for run, b in zip(self._runs, self._b, strict=True):
                at, below = divmod(one.column - self._column - run.column, run.out)
                if rank and 0 <= at < run.count:
                    first = row - run.row - at * run.rank
                    view = b[:, at, below : below + one.size, first : first + rank].transpose(1, 2)
            views.append(view)
            row += rank
        return views

    def put(self, slot: int, adapter: Adapter, layer: int, cutter: Cutter) -> bool:
        is_there = False
        count = len(self._modules)
        a: Sequence[Tensor | None] = [None] * count
        b: Sequence[Tensor | None] = [None] * count
        if self._a is not None:
            parts = self._a[slot].split(self._ranks)
            a = [part if len(part) else None for part in parts]
            b = [None if view is None else view[slot] for view in self._views()]
        for one, own_a, own_b in zip(self._modules, a, b, strict=True):
            for view, parameter in ((own_a, one.a), (own_b, one.b)):
                has = cutter.write(view, adapter, parameter, layer)
                if has is None:
                    return False
                is_there |= has
        self._present[slot] = is_there
        return True

    def bound(self, slots: slice, segments: Segments) -> JoinedLora | None:
        if self._a is None or not any(self._present[slots]):
            return None
        key = slots.start, slots.stop
        if key not in self._cut:
            if len(self._cut) == _CUT:
                self._cut.clear()
            runs = self._runs_of(slots)
            is_joined = len(runs) == 1 and runs[0].is_whole and runs[0].b.shape[1] == 1
            parts = self._parts_of(slots) if is_joined else runs
            self._cut[key] = self._a[slots], runs, parts
        return JoinedLora(self._column, self._columns, *self._cut[key], segments)

    def _parts_of(self, slots: slice) -> _LoraRuns:
        """Each module by itself."""
        rows = accumulate(self._ranks, initial=0)
        return tuple(
            LoraRun(view[slots].transpose(1, 2).unsqueeze(1), one.column - self._column, row, False)
            for view, one, row in zip(self._views(), self._modules, rows, strict=False)
            if view is not None
        )

    def _runs_of(self, slots: slice) -> _LoraRuns:
        rows, columns = sum(self._ranks), self._columns
        return tuple(
            LoraRun(
                b[slots],
                run.column,
                run.row,
                run.count * run.out == columns and run.count * run.rank == rows,
            )
            for run, b in zip(self._runs, self._b, strict=True)
        )


_LoraRuns: TypeAlias = tuple[LoraRun, ...]

_CUT = 32
"""Ranges of slots of which the views are kept: who runs changes every few steps, and by few."""


@dataclass(frozen=True)
class _Run:
    """Neighbouring modules of one output size and rank.

    Attributes:
        column: where the first one's outputs begin, from those of the first that can have LoRA.
        row: where its ranks begin.
        count: modules.
        out: of each.
        rank: of each.
    """

    column: int
    row: int
    count: int
    out: int
    rank: int


def _runs(ranks: Sequence[int], modules: Sequence[Lora]) -> list[_Run]:
    """The modules that have a rank, in as few runs as can be."""
    runs: list[_Run] = []
    row = 0
    for rank, one in zip(ranks, modules, strict=True):
        last, column = runs[-1] if runs else None, one.column - modules[0].column
        place = (one.size, rank, column)
        if last and (last.out, last.rank, last.column + last.count * last.out) == place:
            runs[-1] = replace(last, count=last.count + 1)
        elif rank:
            runs.append(_Run(column, row, 1, one.size, rank))
        row += rank
    return runs


def _turned(stack: Tensor) -> Tensor:
    """The stack, as a view of one whose matrices are transposed."""
    return stack.transpose(1, 2).contiguous().transpose(1, 2)


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

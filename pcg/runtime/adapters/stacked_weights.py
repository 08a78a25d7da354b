"""Stacked weights: the weights of all slots at one attribute of a layer, padded to the largest.

A matrix is stored so that the weights of one output lie together, A as [rank, in] and B as
[out, rank]: the CPU's products of one token by each matrix read that twice as fast. Where there is
the native kernel, B of LoRA is stored as [rank, out], as it reads whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.kernels.batch import JoinedLora, LoraRun, SegmentedWeight, Segments
from pcg.kernels.sgmv import is_native
from pcg.peft.adapter import Adapter
from pcg.peft.registry import parameter_kind
from pcg.runtime.adapters.sites import GraphSites, LoraModule
from pcg.runtime.adapters.weight_stacker import WeightStacker


def stack_sites(
    sites: GraphSites, adapters: Sequence[Adapter | None], layer: int, stacker: WeightStacker
) -> dict[str, StackedWeight]:
    """Stack the adapters' weights at each site of a layer, by attribute."""
    stacks: dict[str, StackedWeight] = {}
    for name, parameter in sites.single:
        stacks[name] = _StackedParameter(adapters, parameter, layer, stacker)
    for one in sites.joined:
        stacks[one.name] = _StackedLora(adapters, one.modules, layer, stacker)
    return stacks


class _StackedParameter:
    """The stacked weights of one parameter."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        stacker: WeightStacker,
    ) -> None:
        self._parameter = parameter
        self._stack, self._present = stacker.stack(adapters, parameter, layer)
        kind = parameter_kind(parameter.source)
        if self._stack is not None and kind.is_up:
            self._stack = _turned(self._stack)
        self._is_a = kind.is_down

    @property
    def size_bytes(self) -> int:
        return 0 if self._stack is None else self._stack.nbytes

    def put(self, slot: int, adapter: Adapter, layer: int, stacker: WeightStacker) -> bool:
        """Write an adapter's weights into a slot; returns False if they do not fit."""
        view = None if self._stack is None else self._stack[slot]
        has = stacker.write(view, adapter, self._parameter, layer)
        self._present[slot] = bool(has)
        return has is not None

    def bound(self, slots: slice, segments: Segments) -> SegmentedWeight | None:
        """Return what the program reads; None if no adapter has a weight there."""
        if self._stack is None or not any(self._present[slots]):
            return None
        weight = self._stack[slots]
        weight = weight.transpose(1, 2) if self._is_a else weight
        return SegmentedWeight(weight, segments, tuple(self._present[slots]))


JOINED_BYTES = 2**20
"""Up to this size a joined B stays in the CPU's cache and is read whole, zeros included."""


class _StackedLora:
    """The LoRA of modules with one input: A joined, B of modules of equal size together."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        modules: Sequence[LoraModule],
        layer: int,
        stacker: WeightStacker,
    ) -> None:
        self._modules = modules
        parts = [
            (stacker.stack(adapters, one.a, layer), stacker.stack(adapters, one.b, layer))
            for one in modules
        ]
        self._column = modules[0].column
        self._columns = modules[-1].column + modules[-1].size - self._column
        self._present = [
            any(found[slot] for (_, found), _ in parts) for slot in range(len(adapters))
        ]
        there = [a for (a, _), _ in parts if a is not None]
        self._a: Tensor | None = None
        self._cut: dict[tuple[int, int], tuple[Tensor, _LoraRuns, _LoraRuns, dict[str, Any]]] = {}
        if not there:
            return
        count, _, in_ = there[0].shape
        a = [there[0].new_zeros(count, 0, in_) if x is None else x for (x, _), _ in parts]
        self._ranks = [part.shape[1] for part in a]
        self._a = torch.cat(a, 1).to(dtype=stacker.lora_dtype)
        size = count * sum(self._ranks) * self._columns * self._a.element_size()
        if len(modules) == 1 or size <= JOINED_BYTES:
            self._runs = [_OutputRun(0, 0, 1, self._columns, sum(self._ranks))]
        else:
            self._runs = _runs(self._ranks, modules)
        self._b = [_empty_b(self._a, count, run) for run in self._runs]
        for view, (_, (b, _)) in zip(self._views(), parts, strict=True):
            if view is not None and b is not None:
                view.copy_(b)

    @property
    def size_bytes(self) -> int:
        return 0 if self._a is None else self._a.nbytes + sum(b.nbytes for b in self._b)

    def _views(self) -> list[Tensor | None]:
        """Return each module's B in all slots, [slots, rank, out]; None for those without."""
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

    def put(self, slot: int, adapter: Adapter, layer: int, stacker: WeightStacker) -> bool:
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
                has = stacker.write(view, adapter, parameter, layer)
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
            self._cut[key] = self._a[slots], runs, parts, {}
        return JoinedLora(self._column, self._columns, *self._cut[key], segments)

    def _parts_of(self, slots: slice) -> _LoraRuns:
        """Return B of each module by itself."""
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


StackedWeight: TypeAlias = _StackedParameter | _StackedLora
_LoraRuns: TypeAlias = tuple[LoraRun, ...]

_CUT = 32
"""Ranges of slots whose views are kept; the running adapters change every few steps, and by few."""


@dataclass(frozen=True)
class _OutputRun:
    """Neighbouring modules of one output size and rank, from their first output and rank on."""

    column: int
    row: int
    count: int
    out: int
    rank: int


def _empty_b(like: Tensor, count: int, run: _OutputRun) -> Tensor:
    """Return zeros, [slots, outputs, out, rank], stored as what multiplies by them reads it."""
    if is_native(like.device, like.dtype):
        return like.new_zeros(count, run.count, run.rank, run.out).transpose(2, 3)
    return like.new_zeros(count, run.count, run.out, run.rank)


def _runs(ranks: Sequence[int], modules: Sequence[LoraModule]) -> list[_OutputRun]:
    """Group the modules that have a rank into as few runs as possible."""
    runs: list[_OutputRun] = []
    row = 0
    for rank, one in zip(ranks, modules, strict=True):
        last, column = runs[-1] if runs else None, one.column - modules[0].column
        place = (one.size, rank, column)
        if last and (last.out, last.rank, last.column + last.count * last.out) == place:
            runs[-1] = replace(last, count=last.count + 1)
        elif rank:
            runs.append(_OutputRun(column, row, 1, one.size, rank))
        row += rank
    return runs


def _turned(stack: Tensor) -> Tensor:
    """Return the stack as a transposed view, whose matrices are stored transposed."""
    return stack.transpose(1, 2).contiguous().transpose(1, 2)

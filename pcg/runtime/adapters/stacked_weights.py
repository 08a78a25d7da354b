"""Stacked weights: the weights of all slots at an attribute of a layer, padded to the largest.

The weights of an output are contiguous, A as [rank, in] and B as [out, rank]: the CPU's products of
a single token by each matrix read this layout twice as fast. The native kernel reads whole rows, so
for this kernel B of LoRA is stored as [rank, out].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.ir.graph import Parameter
from pcg.ir.types import State
from pcg.kernels.batch import JoinedLora, LoraRun, OwnWeights, SegmentedWeight, Segments
from pcg.kernels.sgmv import is_native
from pcg.peft.adapter import Adapter
from pcg.peft.method import Shape
from pcg.peft.registry import parameter_kind
from pcg.peft.weights import Around, ModuleWeights
from pcg.ranks.group import Ranks
from pcg.ranks.shards import (
    has_zeros,
    is_sharded,
    part_of,
    part_of_experts,
    shared_part_of,
)
from pcg.runtime.adapters.sites import GraphSites, LoraModule


class ServedWeights:
    """Derives programs' tensors from adapters on first use."""

    def __init__(self, base: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
        self._base = base
        self._shapes = shapes
        self._kept: WeakKeyDictionary[ModuleWeights, dict[str, Tensor]] = WeakKeyDictionary()

    def part(self, adapter: Adapter, path: str) -> Tensor | None:
        """Return a matrix, such as A [r, in] or scaled Bᵀ [r, out], or a vector [1, n].

        The path ends in the parameter's kind. The result is None for a missing weight.
        """
        module, _, kind = path.rpartition(".")
        if path in adapter.replaced:
            tensor = adapter.replaced[path]
            return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor
        weights = adapter.weights.get(module)
        make = None if weights is None else weights.served.get(kind)
        if weights is None or make is None:
            return None
        base = partial(self._base.__getitem__, module)
        around = Around(base, adapter.shared, self._shapes[module])
        if not parameter_kind(kind).is_costly:
            return make(around)
        kept = self._kept.setdefault(weights, {})
        if kind not in kept:
            kept[kind] = make(around)
        return kept[kind]

    def check_range(self, adapter: Adapter, dtype: torch.dtype | None) -> None:
        """Refuse an adapter with scaled weights that are NaN or infinite in the served dtype.

        Args:
            dtype: the dtype of copies of matrices; None for the adapter's dtype.
        Raises:
            AdapterError: names the matrix, its largest number and the dtype's limit.
        """
        for module, weights in adapter.weights.items():
            for kind in weights.served:
                if parameter_kind(kind).is_costly:  # computed from checked matrices and the base
                    continue
                part = self.part(adapter, f"{module}.{kind}")
                if part is None or not part.numel():
                    continue
                copied = dtype if parameter_kind(kind).is_factor else None
                _check_range(part, copied, f"{kind} of {module} in adapter {adapter.name!r}")

    def changed(self, adapter: Adapter) -> None:
        """Drop the derived tensors of an adapter after its tensors were changed in place."""
        for weights in adapter.weights.values():
            self._kept.pop(weights, None)


def _check_range(part: Tensor, copied: torch.dtype | None, which: str) -> None:
    largest = max(abs(extreme.item()) for extreme in part.aminmax())  # both NaN if any entry is
    served = part.dtype if copied is None else copied
    most = torch.finfo(served).max
    if largest <= most:
        return
    name = str(served).removeprefix("torch.")
    if copied is not None and math.isfinite(largest):
        raise AdapterError(
            f"{which} reaches {largest:.3g} with its scale, and adapters are served in {name}, up "
            f"to {most:.3g}; serve them in float32: adapter_copies='float32', --adapter-copies "
            "float32"
        )
    raise AdapterError(
        f"{which} reaches {largest:.3g} with its scale, and {name} holds up to {most:.3g}; the "
        "scale of adapter_config.json, such as lora_alpha, is not that of its weights"
    )


@dataclass(frozen=True)
class WeightStacker:
    """Stacks adapters' weights for serving, and cuts this rank's shard out of a stack.

    Attributes:
        lora_dtype: the dtype of stacks of LoRA; None for the adapters' dtype.
    """

    weights: ServedWeights
    device: torch.device
    ranks: Ranks
    lora_dtype: torch.dtype | None = None

    def stack(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        least: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor | None, list[bool]]:
        """Stack the weights of adapters for a parameter, with at least `least` rows and columns.

        Returns:
            [adapters, …], or None if no adapter has such a weight; and True for each adapter with
            the weight.
        """
        path = parameter.source.format(layer=layer)
        parts = [
            None if adapter is None else self.weights.part(adapter, path) for adapter in adapters
        ]
        stack = self._cut(parts, parameter, least)
        return None if stack is None else stack.to(self.device), [
            part is not None for part in parts
        ]

    def _cut(
        self, parts: Sequence[Tensor | None], parameter: Parameter, least: Sequence[int]
    ) -> Tensor | None:
        multiples = [1, 1]
        for dim in _open_dims(parameter):
            multiples[dim] = self.ranks.size
        stack = _padded(parts, parameter_kind(parameter.source).fill, multiples, least)
        if stack is None:
            return None
        shard = stack
        if parameter.rows:
            start, stop = parameter.rows
            dim = _stack_dim(parameter, -len(parameter.type.dims))
            shard = shard.narrow(dim, start, stop - start)
        if parameter.part.dim:
            dim = _sharded_dim(parameter)
            if parameter.part.state is State.ROUTED:
                shard = part_of_experts(shard, dim, parameter, self.ranks)
            else:
                shard = shard.narrow(dim, *part_of(parameter, shard.shape[dim], self.ranks))
        if parameter.part.part:
            dim = _stack_dim(parameter, parameter.part.part)
            shard = shard.narrow(dim, *shared_part_of(parameter, shard.shape[dim], self.ranks))
        if has_zeros(parameter, self.ranks):
            return torch.zeros_like(shard)
        # Copy, to free the stack of whole weights.
        return shard.contiguous() if shard is not stack else stack

    def part(self, adapter: Adapter, parameter: Parameter, layer: int) -> Tensor | None:
        """Return an adapter's matrix or vector; over ranks, this rank's shard after padding."""
        part = self.weights.part(adapter, parameter.source.format(layer=layer))
        if part is None or self.ranks.size == 1:
            return part
        stack = self._cut([part], parameter, (0, 0))
        return None if stack is None else stack[0]

    def inner_size(self, size: int, parameter: Parameter) -> int:
        """Return the inner size of `part` for an adapter's rank or width."""
        size = -(-size // self.ranks.size) * self.ranks.size
        is_split = _sharded_dim(parameter) in _open_dims(parameter)
        return size // (self.ranks.size // parameter.part.sharers) if is_split else size

    def write(
        self, view: Tensor | None, adapter: Adapter, parameter: Parameter, layer: int
    ) -> bool | None:
        """Write an adapter's part, or a neutral value, into a place in a stack.

        Args:
            view: rows and columns of the place; None without a stack.
        Returns:
            True if the adapter has a part, False if not, None if the part does not fit.
        """
        if is_sharded(parameter):
            least = self._whole_of(view, parameter)
            stack, (has,) = self.stack([adapter], parameter, layer, least)
            part = None if stack is None else stack[0]
        else:
            part = self.weights.part(adapter, parameter.source.format(layer=layer))
            has = part is not None
        if view is None:
            return False if part is None else None
        if part is None:
            view.fill_(parameter_kind(parameter.source).fill)
            return has
        rows, columns = part.shape
        if rows > view.shape[0] or columns > view.shape[1]:
            return None
        if part.shape != view.shape:
            view.fill_(parameter_kind(parameter.source).fill)
        view[:rows, :columns].copy_(part)
        return has

    def _whole_of(self, view: Tensor | None, parameter: Parameter) -> tuple[int, int]:
        """Return the minimum rows and columns of whole weights with a shard that fills a place."""
        least = [0, 0]
        if view is not None:
            for dim in _open_dims(parameter):
                is_split = dim == _sharded_dim(parameter)
                parts = self.ranks.size // parameter.part.sharers
                least[dim] = view.shape[dim] * (parts if is_split else 1)
        return least[0], least[1]


def _padded(
    parts: Sequence[Tensor | None], absent: float, multiples: Sequence[int], least: Sequence[int]
) -> Tensor | None:
    """Stack parts, with `absent` for missing rows, columns and parts; None without any part."""
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


def _sharded_dim(parameter: Parameter) -> int:
    return _stack_dim(parameter, parameter.part.dim) if parameter.part.dim else 0


def _open_dims(parameter: Parameter) -> tuple[int, ...]:
    """Return a stack's dims with sizes that depend on the adapters, such as their rank."""
    dims = len(parameter.type.dims)
    sizes = enumerate(parameter.type.shape)
    return tuple(_stack_dim(parameter, at - dims) for at, n in sizes if not isinstance(n, int))


def _stack_dim(parameter: Parameter, dim: int) -> int:
    """Return a dim of the stack, which holds B transposed relative to training."""
    return -3 - dim if parameter_kind(parameter.source).is_up else dim


def stack_sites(
    sites: GraphSites, adapters: Sequence[Adapter | None], layer: int, stacker: WeightStacker
) -> dict[str, StackedWeight]:
    """Stack the adapters' weights at each site of a layer, by attribute."""
    stacks: dict[str, StackedWeight] = {}
    for name, parameter in sites.single:
        kind = _OwnStack if parameter.source.endswith(".weight") else _StackedParameter
        stacks[name] = kind(adapters, parameter, layer, stacker)
    for site in sites.joined:
        stacks[site.name] = _StackedLora(adapters, site.modules, layer, stacker)
    return stacks


class _StackedParameter:
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
            self._stack = self._stack.transpose(1, 2).contiguous().transpose(1, 2)
        self._is_a = kind.is_down

    @property
    def size_bytes(self) -> int:
        return 0 if self._stack is None else self._stack.nbytes

    def put(self, slot: int, adapter: Adapter, layer: int, stacker: WeightStacker) -> bool:
        """Write an adapter's weights into a slot; return False if the weights do not fit."""
        view = None if self._stack is None else self._stack[slot]
        has = stacker.write(view, adapter, self._parameter, layer)
        self._present[slot] = bool(has)
        return has is not None

    def bound(self, slots: slice, segments: Segments) -> SegmentedWeight | None:
        """Return the program's weight; None if no adapter has the weight."""
        if self._stack is None or not any(self._present[slots]):
            return None
        weight = self._stack[slots]
        weight = weight.transpose(1, 2) if self._is_a else weight
        return SegmentedWeight(weight, segments, tuple(self._present[slots]))


class _OwnStack:
    """Weights that replace the base's, without padding, as each may be as large as the head."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        parameter: Parameter,
        layer: int,
        stacker: WeightStacker,
    ) -> None:
        self._parameter = parameter
        self._slots: list[Tensor | None] = [None] * len(adapters)
        for slot, adapter in enumerate(adapters):
            if adapter is not None:
                self.put(slot, adapter, layer, stacker)

    @property
    def size_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._slots if weight is not None)

    def put(self, slot: int, adapter: Adapter, layer: int, stacker: WeightStacker) -> bool:
        part = stacker.part(adapter, self._parameter, layer)
        dtype = stacker.lora_dtype
        # A copy, as training changes the adapter's own tensor.
        self._slots[slot] = None if part is None else part.to(stacker.device, dtype, copy=True)
        return True

    def bound(self, slots: slice, segments: Segments) -> OwnWeights | None:
        weights = tuple(self._slots[slots])
        return OwnWeights(weights, segments) if any(w is not None for w in weights) else None


JOINED_BYTES = 2**20
"""The maximum size of a joined B that stays in the CPU's cache, and is read with its zeros."""


class _StackedLora:
    """The LoRA of modules with a common input: joined A, and joined B of modules of equal size."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        modules: Sequence[LoraModule],
        layer: int,
        stacker: WeightStacker,
    ) -> None:
        self._modules = modules
        parts = [
            (stacker.stack(adapters, module.a, layer), stacker.stack(adapters, module.b, layer))
            for module in modules
        ]
        self._column = modules[0].column
        self._columns = modules[-1].column + modules[-1].size - self._column
        self._present = [
            any(has_part[slot] for (_, has_part), _ in parts) for slot in range(len(adapters))
        ]
        present = [a for (a, _), _ in parts if a is not None]
        self._a: Tensor | None = None
        self._cut: dict[tuple[int, int], tuple[Tensor, _LoraRuns, _LoraRuns, dict[str, Any]]] = {}
        if not present:
            return
        count, _, in_ = present[0].shape
        a = [present[0].new_zeros(count, 0, in_) if x is None else x for (x, _), _ in parts]
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
        views: list[Tensor | None] = []
        row = 0
        for rank, m in zip(self._ranks, self._modules, strict=True):
            view = None
            for run, b in zip(self._runs, self._b, strict=True):
                at, below = divmod(m.column - self._column - run.column, run.out)
                if rank and 0 <= at < run.count:
                    first = row - run.row - at * run.rank
                    view = b[:, at, below : below + m.size, first : first + rank].transpose(1, 2)
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
        for module, own_a, own_b in zip(self._modules, a, b, strict=True):
            for view, parameter in ((own_a, module.a), (own_b, module.b)):
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
        rows = accumulate(self._ranks, initial=0)
        return tuple(
            LoraRun(view[slots].transpose(1, 2).unsqueeze(1), m.column - self._column, row, False)
            for view, m, row in zip(self._views(), self._modules, rows, strict=False)
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


StackedWeight: TypeAlias = _StackedParameter | _OwnStack | _StackedLora
_LoraRuns: TypeAlias = tuple[LoraRun, ...]

_CUT = 32
"""Number of ranges of slots with cached views, as running adapters change slowly."""


@dataclass(frozen=True)
class _OutputRun:
    """Neighbouring modules of equal output size and rank."""

    column: int
    row: int
    count: int
    out: int
    rank: int


def _empty_b(like: Tensor, count: int, run: _OutputRun) -> Tensor:
    """Return zeros, [slots, outputs, out, rank], in the product's layout."""
    if is_native(like.device, like.dtype):
        return like.new_zeros(count, run.count, run.rank, run.out).transpose(2, 3)
    return like.new_zeros(count, run.count, run.out, run.rank)


def _runs(ranks: Sequence[int], modules: Sequence[LoraModule]) -> list[_OutputRun]:
    """Group the modules with ranks above 0 into as few runs as possible."""
    runs: list[_OutputRun] = []
    row = 0
    for rank, module in zip(ranks, modules, strict=True):
        last, column = runs[-1] if runs else None, module.column - modules[0].column
        place = (module.size, rank, column)
        if last and (last.out, last.rank, last.column + last.count * last.out) == place:
            runs[-1] = replace(last, count=last.count + 1)
        elif rank:
            runs.append(_OutputRun(column, row, 1, module.size, rank))
        row += rank
    return runs

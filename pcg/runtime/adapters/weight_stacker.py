"""The weights that serving programs read of adapters: each by itself, and stacked as shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.ir.graph import Parameter
from pcg.peft.adapter import Adapter
from pcg.peft.method import Shape
from pcg.peft.registry import parameter_kind
from pcg.peft.weights import Around, ModuleWeights
from pcg.ranks.group import Ranks
from pcg.ranks.shards import has_zeros, is_sharded, part_of


class ServedWeights:
    """Derives the tensors that programs read of adapters, when they are first read."""

    def __init__(self, base: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
        self._base = base
        self._shapes = shapes
        self._kept: WeakKeyDictionary[ModuleWeights, dict[str, Tensor]] = WeakKeyDictionary()

    def part(self, adapter: Adapter, path: str) -> Tensor | None:
        """Return a matrix, such as A [r, in] or scaled Bᵀ [r, out], or a vector [1, n].

        The path ends in the parameter's kind. Without such a weight the result is None.
        """
        module, _, kind = path.rpartition(".")
        if kind == "bias":
            bias = adapter.biases.get(module)
            return None if bias is None else bias.unsqueeze(0)
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
        """Refuse an adapter whose weights, with its scale, are NaN or infinite as they are served.

        Args:
            dtype: that of copies of matrices; None for the adapter's own.
        Raises:
            AdapterError: the matrix, its largest number and the dtype's.
        """
        for module, weights in adapter.weights.items():
            for kind in weights.served:
                if parameter_kind(kind).is_costly:  # made by the base, of matrices that are checked
                    continue
                part = self.part(adapter, f"{module}.{kind}")
                if part is None or not part.numel():
                    continue
                copied = dtype if parameter_kind(kind).is_factor else None
                _check_range(part, copied, f"{kind} of {module} in adapter {adapter.name!r}")

    def changed(self, adapter: Adapter) -> None:
        """Forget what was computed of an adapter, after its tensors were changed in place."""
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
    """Stacks adapters' weights as serving reads them, and cuts this rank's shard out of a stack.

    Attributes:
        lora_dtype: the dtype of stacks of LoRA; None for the adapters' own.
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
        """Stack the weights of adapters at one parameter, of `least` rows and columns.

        Returns:
            [adapters, …], or None if no adapter has a weight there; and which adapters have one.
        """
        path = parameter.source.format(layer=layer)
        parts = [None if one is None else self.weights.part(one, path) for one in adapters]
        stack = self._cut(parts, parameter, least)
        return None if stack is None else stack.to(self.device), [one is not None for one in parts]

    def _cut(
        self, parts: Sequence[Tensor | None], parameter: Parameter, least: Sequence[int]
    ) -> Tensor | None:
        multiples = [1, 1]
        for dim in _open_dims(parameter):
            multiples[dim] = self.ranks.size
        stack = _padded(parts, parameter_kind(parameter.source).fill, multiples, least)
        if stack is None:
            return None
        piece = _shard_of_stack(stack, parameter, self.ranks)
        # A copy, so that the stack of whole weights is freed.
        return piece.contiguous() if piece is not stack else stack

    def part(self, adapter: Adapter, parameter: Parameter, layer: int) -> Tensor | None:
        """Return an adapter's matrix or vector; over ranks this rank's shard, cut after padding."""
        part = self.weights.part(adapter, parameter.source.format(layer=layer))
        if part is None or self.ranks.size == 1:
            return part
        stack = self._cut([part], parameter, (0, 0))
        return None if stack is None else stack[0]

    def inner_size(self, size: int, parameter: Parameter) -> int:
        """Return the inner size that `part` has for an adapter of this rank or width."""
        size = -(-size // self.ranks.size) * self.ranks.size
        is_split = _sharded_dim(parameter) in _open_dims(parameter)
        return size // self.ranks.size if is_split else size

    def write(
        self, view: Tensor | None, adapter: Adapter, parameter: Parameter, layer: int
    ) -> bool | None:
        """Write an adapter's part, or its neutral value, into its place in a stack.

        Args:
            view: rows and columns of the place; None if there is no stack yet.
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
        """Return the least rows and columns of whole weights whose shard fills a place."""
        least = [0, 0]
        if view is not None:
            for dim in _open_dims(parameter):
                is_split = dim == _sharded_dim(parameter)
                least[dim] = view.shape[dim] * (self.ranks.size if is_split else 1)
        return least[0], least[1]


def _padded(
    parts: Sequence[Tensor | None], absent: float, multiples: Sequence[int], least: Sequence[int]
) -> Tensor | None:
    """Stack parts, with `absent` in missing rows, columns and parts; None if all are missing."""
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


def _shard_of_stack(stack: Tensor, parameter: Parameter, ranks: Ranks) -> Tensor:
    """Return a rank's shard of a stack of adapters' matrices, or of vectors as [1, n]."""
    if parameter.rows:
        start, stop = parameter.rows
        stack = stack.narrow(_stack_dim(parameter, -len(parameter.type.dims)), start, stop - start)
    if parameter.part.dim:
        dim = _sharded_dim(parameter)
        stack = stack.narrow(dim, *part_of(parameter, stack.shape[dim], ranks))
    return torch.zeros_like(stack) if has_zeros(parameter, ranks) else stack


def _sharded_dim(parameter: Parameter) -> int:
    """Return the dim of a stack that is partitioned over ranks; 0 for none."""
    return _stack_dim(parameter, parameter.part.dim) if parameter.part.dim else 0


def _open_dims(parameter: Parameter) -> tuple[int, ...]:
    """Return the dims of a stack whose sizes depend on the adapters, such as their rank."""
    dims = len(parameter.type.dims)
    sizes = enumerate(parameter.type.shape)
    return tuple(_stack_dim(parameter, at - dims) for at, n in sizes if not isinstance(n, int))


def _stack_dim(parameter: Parameter, dim: int) -> int:
    """Return a dim of the stack, which holds B as the transpose of what training reads."""
    return -3 - dim if parameter_kind(parameter.source).is_up else dim

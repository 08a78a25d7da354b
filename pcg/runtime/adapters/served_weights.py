"""Served weights: the tensors that serving programs read of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from weakref import WeakKeyDictionary

from torch import Tensor

from pcg.peft.adapter import Adapter
from pcg.peft.method import Shape
from pcg.peft.registry import parameter_kind
from pcg.peft.weights import Around, ModuleWeights


class ServedWeights:
    """Derives the tensors that programs read of adapters, when they are first read."""

    def __init__(self, base: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
        self._base = base
        self._shapes = shapes
        self._kept: WeakKeyDictionary[ModuleWeights, dict[str, Tensor]] = WeakKeyDictionary()

    def part(self, adapter: Adapter, path: str) -> Tensor | None:
        """Return a matrix, such as A [r, in] or scaled Bᵀ [r, out], or a vector [1, n].

        The path ends in the parameter's kind. It is None if the adapter has no such weight.
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

    def changed(self, adapter: Adapter) -> None:
        """Forget what was computed of an adapter, after its tensors were changed in place."""
        for weights in adapter.weights.values():
            self._kept.pop(weights, None)

"""Products by the base's weights, which an emitted function asks its caller for.

A function that asks is a generator: it hands out a `Product`, and goes on when that was run. So
functions that run in the same step, such as what serves a batch and the window of a finetuning job,
run the products that they have in common once, over the tokens of all of them: the base executor of
Symbiosis, in one process. The base's weights are read once, whatever else the functions differ in.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Asking = Generator["Product", None, Any]
"""A function that asks for products, and returns anything."""


class Product:
    """x by some weights of the base, to be run by whoever drives the function that asks.

    Attributes:
        key: layer, name of the first weight and number of weights: products of one key can be one.
        x: [T, in].
        weights: [out, in] each; one joined, and None for the others, where the runtime joined them.
        biases: of each; empty for none.
        is_whole: whether the outputs are wanted side by side in one tensor.
    """

    __slots__ = ("_outputs", "biases", "is_whole", "key", "weights", "x")

    def __init__(
        self,
        key: tuple[object, ...],
        x: Tensor,
        weights: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        is_whole: bool,
    ) -> None:
        self.key = key
        self.x: Tensor | None = x
        self.weights = weights
        self.biases = biases
        self.is_whole = is_whole
        self._outputs: Any = None

    def run(self) -> None:
        """Run it by itself."""
        x, self.x = self.x, None
        assert x is not None
        if self.is_whole:
            first: Any = self.weights[0]
            self._outputs = linear(x, first, first.group_bias)
        else:
            self._outputs = linear_group(x, self.weights, self.biases)

    def run_with(self, others: Sequence[Product]) -> None:
        """Run it and others of its key as one, by the weights of one that has them joined."""
        every = (self, *others)
        best = next((one for one in every if one._is_joined), self)
        parts = [one.x for one in every]
        counts = [len(x) for x in parts if x is not None]
        x = torch.cat([x for x in parts if x is not None])
        outputs = linear_group(x, best.weights, best.biases)
        split = [out.split(counts) for out in outputs]
        for i, one in enumerate(every):
            own = [rows[i] for rows in split]
            one.x = None
            # Each has memory of its own, which goes when it needs it no more.
            one._outputs = torch.cat(own, -1) if one.is_whole else [rows.clone() for rows in own]

    @property
    def _is_joined(self) -> bool:
        return hasattr(self.weights[0], "group_sizes")

    def take(self) -> Any:
        """The outputs, once."""
        outputs, self._outputs = self._outputs, None
        return outputs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ b); the weight plain, or packed by oneDNN."""
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


_packed_linear = torch.ops.mkldnn._linear_pointwise


def linear_group(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None] = ()
) -> Sequence[Tensor]:
    """The linear operators of x; joined where the first weight holds all and the rest are None."""
    first: Any = weights[0]
    if hasattr(first, "group_sizes"):
        y = linear(x, first, first.group_bias)
        outs: Sequence[Tensor] = y.split(first.group_sizes, -1) if len(weights) > 1 else (y,)
        return outs
    padded = biases or [None] * len(weights)
    return [linear(x, w, b) for w, b in zip(weights, padded, strict=True)]  # type: ignore[arg-type]


def product(
    batch: Any,
    name: str,
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] = (),
    *,
    whole: bool = False,
) -> Asking:
    """Ask for x by each of some weights.

    Args:
        batch: whose tokens x has.
        name: of the first weight in its layer.
        x: [T, in].
        weights: [out, in] each.
        biases: of each; empty for none.
        whole: give the outputs as one tensor, [T, outs], that may be written over.
    Returns:
        Their outputs, [T, out] each.
    """
    asked = Product((batch.layer, name, len(weights)), x, weights, biases, whole)
    del x
    yield asked
    return asked.take()

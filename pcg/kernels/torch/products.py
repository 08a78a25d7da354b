"""Products by the base's weights, which an emitted function asks its caller for.

A function that asks is a generator: it hands out a `Product`, and goes on when that was run. So
functions that run in the same step, such as what serves a batch and the window of a finetuning job,
or the windows of several jobs on their way back, run the products that they have in common once,
over the tokens of all of them: the base executor of Symbiosis, in one process. The base's weights
are read once, whatever else the functions differ in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Result = TypeVar("Result")
ProductRequest: TypeAlias = Generator["Product", None, Result]
"""A running function that requests products, and what it returns."""


class Product(ABC):
    """A product by the base, to be run by whoever drives the function that asks.

    Attributes:
        key: layer, name of the first weight, and what is asked for: products of one key can be one.
        is_own: whether it is by an adapter's weights alone, which not all functions have.
    """

    __slots__ = ("_outputs", "_x", "key")
    is_own: ClassVar[bool] = False

    def __init__(self, key: tuple[object, ...], x: Tensor) -> None:
        self.key = key
        self._x: Tensor | None = x
        self._outputs: Any = None

    @abstractmethod
    def run(self) -> None:
        """Run it by itself."""

    @abstractmethod
    def run_with(self, others: Sequence[Self]) -> None:
        """Run it and others of its key as one."""

    def take(self) -> Any:
        """The outputs, once."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def _take_x(self) -> Tensor:
        """What it is of, which it holds no more."""
        x, self._x = self._x, None
        assert x is not None
        return x


class LinearProduct(Product):
    """x Wᵀ (+ b) by some weights.

    Attributes:
        weights: [out, in] each; one joined, and None for the others, where the runtime joined them.
        biases: of each; empty for none.
        is_whole: whether the outputs are wanted side by side in one tensor.
    """

    __slots__ = ("biases", "is_whole", "weights")

    def __init__(
        self,
        key: tuple[object, ...],
        x: Tensor,
        weights: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        is_whole: bool,
    ) -> None:
        super().__init__(key, x)
        self.weights = weights
        self.biases = biases
        self.is_whole = is_whole

    def run(self) -> None:
        x = self._take_x()
        if self.is_whole:
            first: Any = self.weights[0]
            self._outputs = linear(x, first, first.group_bias)
        else:
            self._outputs = linear_group(x, self.weights, self.biases)

    def run_with(self, others: Sequence[LinearProduct]) -> None:
        """Run it and others of its key as one, by the weights of one that has them joined."""
        every = (self, *others)
        best = next((one for one in every if one._is_joined), self)
        x, counts = joined_tokens(every)
        outputs = linear_group(x, best.weights, best.biases)
        split = [out.split(counts) for out in outputs]
        for i, one in enumerate(every):
            own = [rows[i] for rows in split]
            # Each has memory of its own, which goes when it needs it no more.
            one._outputs = torch.cat(own, -1) if one.is_whole else [rows.clone() for rows in own]

    @property
    def _is_joined(self) -> bool:
        return hasattr(self.weights[0], "group_sizes")


class Bypass(ABC):
    """What a bypass network adds to the gradient of what a linear operator was given."""

    @abstractmethod
    def run(self, dy: Tensor, dx: Tensor, parts: Sequence[Part[Self]]) -> None:
        """Add it to dx for each of these, in one go.

        Args:
            dy: [T, out].
            dx: the base's gradient, [T, in]; written over.
            parts: the bypass networks, this one too, and their tokens.
        """


Own = TypeVar("Own", bound=Bypass)


@dataclass(frozen=True)
class Part(Generic[Own]):
    """A bypass network and its tokens.

    Attributes:
        bypass: one.
        start: its first token.
        count: of its tokens.
    """

    bypass: Own
    start: int
    count: int


class InputGradient(Product):
    """dy W, of what a linear operator was given, and what a bypass network adds to it.

    Attributes:
        weight: [out, in].
        bypass: of the operator; None where it is in nodes of its own.
    """

    __slots__ = ("bypass", "weight")

    def __init__(
        self, key: tuple[object, ...], dy: Tensor, weight: Tensor, bypass: Bypass | None
    ) -> None:
        super().__init__(key, dy)
        self.weight = weight
        self.bypass = bypass

    def run(self) -> None:
        (self._outputs,) = self._made((self,))

    def run_with(self, others: Sequence[InputGradient]) -> None:
        every = (self, *others)
        for one, rows in zip(every, self._made(every), strict=True):
            one._outputs = rows.clone()

    def _made(self, every: Sequence[InputGradient]) -> Sequence[Tensor]:
        dy, counts = joined_tokens(every)
        dx = linear_backward(dy, self.weight)
        starts = accumulate(counts[:-1], initial=0)
        parts = [
            Part(one.bypass, start, count)
            for one, start, count in zip(every, starts, counts, strict=True)
            if one.bypass is not None
        ]
        if parts:
            parts[0].bypass.run(dy, dx, parts)
        own: Sequence[Tensor] = dx.split(counts)
        return own


def joined_tokens(every: Sequence[Product]) -> tuple[Tensor, list[int]]:
    """The tokens of all, and how many each has."""
    parts = [one._take_x() for one in every]
    return torch.cat(parts) if len(parts) > 1 else parts[0], [len(part) for part in parts]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ b); the weight plain, or packed by oneDNN."""
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


_packed_linear = torch.ops.mkldnn._linear_pointwise


def linear_backward(dy: Tensor, weight: Tensor) -> Tensor:
    """dx = dy W."""
    if dy.is_cpu and dy.dtype in (torch.bfloat16, torch.float16):
        # Without native support, the product by a plain weight takes ten times as long.
        return F.linear(dy, weight.t().contiguous())
    return dy @ weight


def linear_group(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None] = ()
) -> Sequence[Tensor]:
    """The linear operators of x; joined where the first weight holds all and the rest are None."""
    first: Any = weights[0]
    if hasattr(first, "group_sizes"):
        y = linear(x, first, first.group_bias if biases else None)
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
) -> ProductRequest[Any]:
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
    key = (batch.layer, name, len(weights), bool(biases))
    asked = LinearProduct(key, x, weights, biases, whole)
    del x
    yield asked
    return asked.take()


def product_backward(
    batch: Any, name: str, dy: Tensor, weight: Tensor, bypass: Bypass | None = None
) -> ProductRequest[Any]:
    """Ask for dy by a weight, the gradient of what its linear operator was given.

    Args:
        batch: whose tokens dy has.
        name: of the weight in its layer.
        dy: [T, out].
        weight: [out, in].
        bypass: what is added to it on the way.
    Returns:
        dx, [T, in].
    """
    asked = InputGradient((batch.layer, name, "backward"), dy, weight, bypass)
    del dy
    yield asked
    return asked.take()

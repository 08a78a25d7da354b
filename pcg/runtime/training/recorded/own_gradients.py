"""Gradients in memory that stays, to which recorded functions add."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OwnGradients:
    """The memory of the gradients of an adapter's tensors, for as long as it is trained."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Have the gradients of weights add up there; those without one begin with zeros."""
        fresh: list[Tensor] = []
        for weight in weights:
            own = self._of.get(id(weight))
            if own is None:
                own = self._of[id(weight)] = torch.zeros_like(weight)
            if weight.grad is own:
                continue
            if weight.grad is None:
                fresh.append(own)
            else:
                own.copy_(weight.grad)
            weight.grad = own
        if fresh:
            torch._foreach_zero_(fresh)

    def holds(self, weights: Iterable[Tensor]) -> bool:
        """Return whether all of these weights have their gradients there."""
        return all(w.grad is not None and w.grad is self._of.get(id(w)) for w in weights)

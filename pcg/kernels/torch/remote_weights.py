"""Weights of the base that another process holds, and multiplies by.

An emitted function is given a tensor of the weight's shape and dtype on the device `meta`, which
has no memory. It carries the `RemoteWeight` that asks for products by it, so that a tensor which
somebody reads otherwise is an error, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class RemoteWeight(Protocol):
    """A weight W [out, in] that is not in this process."""

    def linear(self, x: Tensor, others: Sequence[Self]) -> Tensor:
        """Return x Wᵀ by this weight and others, side by side: [T, outs], in memory of its own."""

    def joined(self, others: Sequence[Self]) -> Self:
        """Return this weight and others as one, [outs, in]."""

    def input_gradient(self, dy: Tensor) -> Tensor:
        """Return dy W, [T, in]."""

    def adapted_lengths(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return ||W + scale · B A|| of each output, [out], in A's dtype."""

    def piece(self, text: str, layer: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a piece's outputs: a graph as text, that runs where the weight is."""

    def digest(self) -> str:
        """Return the SHA-256 of the SHA-256 of all rows."""


def remote_tensor(shape: Sequence[int], dtype: torch.dtype, weight: RemoteWeight) -> Tensor:
    """Return a tensor without memory that stands for a remote weight."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
    tensor.remote = weight  # type: ignore[attr-defined]
    return tensor


def is_remote(tensor: Tensor | None) -> bool:
    """Return whether a tensor stands for a weight of another process."""
    return tensor is not None and tensor.is_meta


def remote_of(tensor: Any) -> RemoteWeight:
    """Return the weight that a tensor stands for."""
    found: RemoteWeight = tensor.remote
    return found


def remote_group(tensors: Sequence[Tensor]) -> Tensor:
    """Return a tensor that stands for some remote weights of the same inputs as one."""
    first, *others = map(remote_of, tensors)
    shape = (sum(len(one) for one in tensors), *tensors[0].shape[1:])
    return remote_tensor(shape, tensors[0].dtype, first.joined(others))

"""Collectives of a rank's graph, over the ranks that its batch names."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """A tensor-parallel group, as one of its ranks sees it.

    Attributes:
        rank: which it is.
        size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in one of the same shape."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ranks' tensors, in their order."""


class Spread(Protocol):
    """A batch that runs on several ranks."""

    ranks: Ranks


def all_reduce(x: Tensor, batch: Spread) -> Tensor:
    """The sum over the ranks."""
    return batch.ranks.all_reduce(x)


def all_gather(x: Tensor, dim: int, batch: Spread) -> Tensor:
    """The ranks' parts joined along a dim."""
    return torch.cat(batch.ranks.all_gather(x.contiguous()), dim)


def placed_part(x: Tensor, dim: int, batch: Spread) -> Tensor:
    """The rank's part of a dim, with zeros for the others'."""
    shape = list(x.shape)
    shape[dim] *= batch.ranks.size
    whole = x.new_zeros(shape)
    own_part(whole, dim, batch).copy_(x)
    return whole


def own_part(x: Tensor, dim: int, batch: Spread) -> Tensor:
    """The rank's part of a dim."""
    size = x.shape[dim] // batch.ranks.size
    return x.narrow(dim, batch.ranks.rank * size, size)

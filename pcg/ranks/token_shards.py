"""Shards of a step's T tokens over n ranks.

    P = ceil(T / n) rows on every rank; rank i has tokens i P to (i + 1) P of T

So one graph serves all ranks. Where n does not divide T, the last rows are padding: a few of one
rank, and all P of some where T is less than n. They are zeros in shards of whole tensors, and are
dropped where shards are gathered, so that their gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shard_rows(tokens: int, degree: int) -> int:
    """Number of rows of each rank's shard."""
    return -(-tokens // degree)


def rows_of_rank(x: Tensor, rank: int, degree: int) -> Tensor:
    """A rank's rows of x [T, …], a view where none is padding: [P, …]."""
    count = shard_rows(x.shape[0], degree)
    own = x[rank * count : (rank + 1) * count]
    if own.shape[0] == count:
        return own
    padded = x.new_zeros(count, *x.shape[1:])
    padded[: own.shape[0]] = own
    return padded


def gathered_rows(parts: Sequence[Tensor], tokens: int) -> Tensor:
    """The ranks' shards without padding: [T, …]."""
    count = parts[0].shape[0]
    return torch.cat([part[: max(0, tokens - i * count)] for i, part in enumerate(parts)])


def placed_rows(part: Tensor, rank: int, tokens: int) -> Tensor:
    """A rank's shard among zeros: [T, …]."""
    whole = part.new_zeros(tokens, *part.shape[1:])
    own = whole[rank * part.shape[0] : (rank + 1) * part.shape[0]]
    own.copy_(part[: own.shape[0]])
    return whole


def chosen_rows(part: Tensor, rows: Tensor, rank: int) -> Tensor:
    """The wanted rows of the whole that are in a rank's shard [P, …], zeros for others: [rows, …].

    `rows` are indices of tokens of the whole.
    """
    own = rows - rank * part.shape[0]
    is_own = (own >= 0) & (own < part.shape[0])
    found = part[own.clamp(0, part.shape[0] - 1)]
    found[~is_own] = 0
    return found

"""Which of a step's T tokens a rank of n holds, where it holds a part of them.

    P = ceil(T / n) rows on every rank; rank i has tokens i P to (i + 1) P of T

So one graph serves all ranks. Where n does not divide T, the last rows stand for no token: a few of
one rank, and all P of some where T is less than n. They are zeros in what is cut out of whole
tensors, whatever operators make of them is dropped where parts are joined, and so their gradient is
zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shard_rows(tokens: int, degree: int) -> int:
    """Rows of each rank's part."""
    return -(-tokens // degree)


def rows_of_rank(x: Tensor, rank: int, degree: int) -> Tensor:
    """A rank's rows of x [T, …], a view of it where there are as many: [P, …]."""
    count = shard_rows(x.shape[0], degree)
    own = x[rank * count : (rank + 1) * count]
    if own.shape[0] == count:
        return own
    padded = x.new_zeros(count, *x.shape[1:])
    padded[: own.shape[0]] = own
    return padded


def gathered_rows(parts: Sequence[Tensor], tokens: int) -> Tensor:
    """The ranks' parts without the rows that stand for no token: [T, …]."""
    count = parts[0].shape[0]
    return torch.cat([part[: max(0, tokens - i * count)] for i, part in enumerate(parts)])


def placed_rows(part: Tensor, rank: int, tokens: int) -> Tensor:
    """A rank's part among zeros: [T, …]."""
    whole = part.new_zeros(tokens, *part.shape[1:])
    own = whole[rank * part.shape[0] : (rank + 1) * part.shape[0]]
    own.copy_(part[: own.shape[0]])
    return whole


def chosen_rows(part: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Of a rank's part the rows that are wanted of the whole, zeros for other ranks': [rows, …].

    Args:
        part: [P, …].
        rows: indices of tokens of the whole.
        rank: that has the part.
    """
    own = rows - rank * part.shape[0]
    is_own = (own >= 0) & (own < part.shape[0])
    found = part[own.clamp(0, part.shape[0] - 1)]
    found[~is_own] = 0
    return found

"""Shards: the part that one rank holds of a tensor that is whole in a file or in an adapter.

A rank's parameter describes it by `rows` of the whole's first dim, and by the layout `part` of
these rows: of n ranks, rank r has entries r m/n … (r + 1) m/n of a partitioned dim of size m. Where
c ranks share a part, those are entries p c m/n … (p + 1) c m/n, with p the quotient r / c. A
tensor that is held as summands is whole on the first rank and zeros on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.ir.layouts import PRE_REDUCE
from pcg.ranks.group import Ranks

Ranges = tuple[tuple[int, int], ...]
"""The first entry and the end of the part of each dim of a tensor."""


def is_sharded(parameter: Parameter) -> bool:
    """Return whether a rank holds a tensor otherwise than as a whole."""
    return bool(parameter.rows or parameter.part.dim) or parameter.part == PRE_REDUCE


def ranges_of(parameter: Parameter, shape: Sequence[int], ranks: Ranks) -> Ranges:
    """Return the range that a rank holds of each dim of a whole tensor of this shape."""
    ranges = [(0, size) for size in shape]
    if parameter.rows:
        ranges[0] = parameter.rows
    dim = parameter.part.dim
    if dim:
        start, stop = ranges[dim]
        place, size = part_of(parameter, stop - start, ranks)
        ranges[dim] = (start + place, start + place + size)
    return tuple(ranges)


def part_of(parameter: Parameter, size: int, ranks: Ranks) -> tuple[int, int]:
    """Return where a rank's part of a dim of this size begins, and the part's size."""
    part = size // (ranks.size // parameter.copies)
    return ranks.rank // parameter.copies * part, part


def has_zeros(parameter: Parameter, ranks: Ranks) -> bool:
    """Return whether a rank holds zeros, as a summand."""
    return parameter.part == PRE_REDUCE and ranks.rank > 0


def shard_of(whole: Tensor, parameter: Parameter, ranks: Ranks) -> Tensor:
    """Return a rank's shard of a tensor; a view if it is a part of it."""
    if not is_sharded(parameter):
        return whole
    ranges = ranges_of(parameter, whole.shape, ranks)
    piece = whole[tuple(slice(*bounds) for bounds in ranges)]
    return torch.zeros_like(piece) if has_zeros(parameter, ranks) else piece

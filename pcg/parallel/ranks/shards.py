"""Shards: the part that one rank holds of a tensor that is whole in a file or in an adapter.

A rank's parameter names it by `rows`, of the whole's first dim, and `part`, of those rows: with n
ranks, the rank r has entries r m/n … (r + 1) m/n of the m of a dim that is partitioned. Of a tensor
that is held as summands the first rank has all, the others zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.ir.layouts import PRE_REDUCE
from pcg.parallel.ranks.group import Ranks

Ranges = tuple[tuple[int, int], ...]
"""The first entry and the end of the part of each dim of a tensor."""


def is_piece(parameter: Parameter) -> bool:
    """Whether a rank holds less of it than all, or something else."""
    return bool(parameter.rows or parameter.part.dim) or parameter.part == PRE_REDUCE


def ranges_of(parameter: Parameter, shape: Sequence[int], ranks: Ranks) -> Ranges:
    """What a rank holds of each dim of a tensor that is of this shape as a whole."""
    ranges = [(0, size) for size in shape]
    if parameter.rows:
        ranges[0] = parameter.rows
    dim = parameter.part.dim
    if dim:
        start, stop = ranges[dim]
        size = (stop - start) // ranks.size
        ranges[dim] = (start + ranks.rank * size, start + (ranks.rank + 1) * size)
    return tuple(ranges)


def has_zeros(parameter: Parameter, ranks: Ranks) -> bool:
    """Whether a rank's summand is zeros."""
    return parameter.part == PRE_REDUCE and ranks.rank > 0


def piece_of(whole: Tensor, parameter: Parameter, ranks: Ranks) -> Tensor:
    """A rank's piece of a tensor; a view where it is not all of it."""
    if not is_piece(parameter):
        return whole
    ranges = ranges_of(parameter, whole.shape, ranks)
    piece = whole[tuple(slice(*bounds) for bounds in ranges)]
    return torch.zeros_like(piece) if has_zeros(parameter, ranks) else piece

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

TRANSPOSED = ("lora_B", "_adapter_up")
"""Kinds of which serving has the transpose of what training reads."""


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


def piece_of_stack(stack: Tensor, parameter: Parameter, ranks: Ranks) -> Tensor:
    """A rank's piece of adapters' tensors, as serving has them.

    Args:
        stack: [adapters, …], of matrices, some transposed, or of vectors as [1, n].
        parameter: that a rank's program reads.
        ranks: the group.
    """
    if parameter.rows:
        start, stop = parameter.rows
        stack = stack.narrow(_stack_dim(parameter, -len(parameter.type.dims)), start, stop - start)
    if parameter.part.dim:
        dim = parted_dim(parameter)
        size = stack.shape[dim] // ranks.size
        stack = stack.narrow(dim, ranks.rank * size, size)
    return torch.zeros_like(stack) if has_zeros(parameter, ranks) else stack


def parted_dim(parameter: Parameter) -> int:
    """The dim of a stack of which each rank has a part; 0 for none."""
    return _stack_dim(parameter, parameter.part.dim) if parameter.part.dim else 0


def open_dims(parameter: Parameter) -> tuple[int, ...]:
    """The dims of a stack that are as large as adapters have them, as their rank."""
    dims = len(parameter.type.dims)
    sizes = enumerate(parameter.type.shape)
    return tuple(_stack_dim(parameter, at - dims) for at, n in sizes if not isinstance(n, int))


def _stack_dim(parameter: Parameter, dim: int) -> int:
    return -3 - dim if parameter.source.endswith(TRANSPOSED) else dim

"""Stack shards: the part of adapters' stacked tensors that one rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.parallel.ranks.group import Ranks
from pcg.parallel.ranks.shards import has_zeros
from pcg.peft.registry import parameter_kind


def shard_of_stack(stack: Tensor, parameter: Parameter, ranks: Ranks) -> Tensor:
    """Return a rank's shard of a stack of adapters' tensors.

    Args:
        stack: [adapters, …], of matrices, some transposed, or of vectors as [1, n].
        parameter: the parameter of the rank's program.
    """
    if parameter.rows:
        start, stop = parameter.rows
        stack = stack.narrow(_stack_dim(parameter, -len(parameter.type.dims)), start, stop - start)
    if parameter.part.dim:
        dim = sharded_dim(parameter)
        size = stack.shape[dim] // ranks.size
        stack = stack.narrow(dim, ranks.rank * size, size)
    return torch.zeros_like(stack) if has_zeros(parameter, ranks) else stack


def sharded_dim(parameter: Parameter) -> int:
    """Return the dim of a stack that is partitioned over ranks; 0 for none."""
    return _stack_dim(parameter, parameter.part.dim) if parameter.part.dim else 0


def open_dims(parameter: Parameter) -> tuple[int, ...]:
    """Return the dims of a stack whose sizes depend on the adapters, such as their rank."""
    dims = len(parameter.type.dims)
    sizes = enumerate(parameter.type.shape)
    return tuple(_stack_dim(parameter, at - dims) for at, n in sizes if not isinstance(n, int))


def _stack_dim(parameter: Parameter, dim: int) -> int:
    """Return a dim of the stack, which holds B as the transpose of what training reads."""
    return -3 - dim if parameter_kind(parameter.source).is_up else dim

"""Layouts: how the ranks of a tensor-parallel group hold a tensor (FlexLLM §5.1, figure 6).

    -    whole: each rank holds the whole tensor and its whole gradient
    =    replicated: each rank holds the whole tensor and a summand of its gradient
    |d   partitioned: each rank holds an equal part of dim d, and that part's gradient
    +    pre-reduce: each rank holds a summand of the tensor and its whole gradient

A gradient's layout is the dual of its tensor's: `=` and `+` are each other's dual, `-` and `|d`
their own. The layouts of an operator's inputs therefore determine those of its gradients, and a
single table of rules serves both directions.

    transition       forward               backward
    - → =            replicate: nothing    reduce: all-reduce
    + → -            reduce: all-reduce    replicate: nothing
    - → |d           partition: a slice    combine: all-gather
    |d → -           combine: all-gather   partition: a slice
    = → |d           take: a slice         place: zeros around the part
    |d → +           place: zeros around   take: a slice
    + → |d           scatter: reduce-      gather: all-gather
    |d → =           gather: all-gather    scatter: reduce-scatter

The last two apply to tokens, in parts of `part_of_tokens` rows (sequence parallelism: Korthikanti
et al. 2022, Reducing Activation Recomputation in Large Transformer Models, §4.2.2).
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

from pcg.ir.types import TOKENS, Dim, State, TensorType, part_of_tokens


class Layout(NamedTuple):
    """A layout of a tensor over the ranks.

    Attributes:
        state: the state of the tensor, or of its partitioned dim.
        dim: the partitioned dim, counted from the end (-1 is the last); 0 for none.
    """

    state: State
    dim: int = 0

    def __str__(self) -> str:
        return f"{self.state.value}{self.dim}" if self.dim else self.state.value

    def of(self, type_: TensorType, degree: int) -> TensorType:
        """Return the type in this layout over `degree` ranks; `=` and `+` mark the first dim."""
        if self.state is State.WHOLE or degree == 1:
            return type_
        dims = list(type_.dims) or [Dim(1)]
        at = len(dims) + self.dim if self.dim else 0
        dims[at] = Dim(dims[at].size, self.state, degree)
        return dataclasses.replace(type_, dims=tuple(dims))

    def fits(self, type_: TensorType, degree: int) -> bool:
        """Return whether a tensor of this type has equal parts in this layout."""
        if not self.dim:
            return True
        if len(type_.dims) < -self.dim:
            return False
        size = type_.shape[self.dim]
        return not isinstance(size, int) or size % degree == 0


WHOLE = Layout(State.WHOLE)
REPLICATED = Layout(State.REPLICATED)
PRE_REDUCE = Layout(State.PRE_REDUCE)


@lru_cache(maxsize=64)
def partitioned(dim: int) -> Layout:
    """Return the layout of parts of a dim, counted from the end."""
    return Layout(State.PARTITIONED, dim)


@lru_cache(maxsize=4096)
def token_part(type_: TensorType) -> Layout:
    """Return the layout of parts of the tokens; whole for a tensor without a token dim."""
    return partitioned(-len(type_.dims)) if type_.is_token_wise else WHOLE


class Sharding(NamedTuple):
    """A way to run an operator on ranks, each on its own part, without communication.

    Attributes:
        inputs: layouts of the inputs.
        outputs: layouts of the outputs.
        op: the operator that a rank runs instead; empty for the same operator.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    op: str = ""

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.inputs))}) → ({', '.join(map(str, self.outputs))})"


def sharding(*layouts: Layout) -> Sharding:
    """Return the sharding of an operator with one output; the output's layout is last."""
    return Sharding(layouts[:-1], layouts[-1:])


def local_type(type_: TensorType, layout: Layout, degree: int) -> TensorType:
    """Return the type of a rank's part; a symbolic rank is a multiple of the degree."""
    if not layout.dim:
        return type_
    sizes = list(type_.shape)
    size = sizes[layout.dim]
    part = size // degree if isinstance(size, int) else size / degree
    sizes[layout.dim] = part_of_tokens(degree) if size == TOKENS else part
    return type_.with_shape(tuple(sizes))


def dual(layout: Layout) -> Layout:
    """Return the layout of a tensor's gradient."""
    pair = {State.REPLICATED: PRE_REDUCE, State.PRE_REDUCE: REPLICATED}
    return pair.get(layout.state, layout)


def layout_of(type_: TensorType) -> Layout:
    """Return the layout of a type; the inverse of `Layout.of`."""
    for at, dim in enumerate(type_.dims):
        if dim.state is State.PARTITIONED:
            return partitioned(at - len(type_.dims))
        if dim.state is not State.WHOLE:
            return Layout(dim.state)
    return WHOLE


def whole_type(type_: TensorType) -> TensorType:
    """Return the type without its layout."""
    return type_.with_shape(type_.shape)

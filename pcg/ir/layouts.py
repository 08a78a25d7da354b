"""Layouts: how the ranks of a tensor-parallel group hold a tensor (FlexLLM §5.1, figure 6).

    -    whole: each rank holds the whole tensor and its whole gradient
    =    replicated: each rank holds the whole tensor and a summand of its gradient
    |d   partitioned: each rank holds an equal part of dim d, and that part's gradient
    +    pre-reduce: each rank holds a summand of the tensor and its whole gradient
    ~    routed: each rank holds the rows of the experts that are its own, and their gradient
    ~d   routed: each rank holds the weights of its experts, which share dim d, and their gradient
    ~|d, ~d|e   of these, each of the ranks with the same experts holds an equal part of dim d, or e

A gradient's layout is the dual of its tensor's: `=` and `+` are each other's dual, `-`, `|d` and
`~` their own. The layouts of an operator's inputs therefore determine those of its gradients, and a
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
    = → ~            route: nothing        nothing
    |d → ~           dispatch: all-to-all  collect: all-to-all
    ~ → |d           collect: all-to-all   dispatch: all-to-all

Experts may be partitioned over the ranks (expert parallelism): rank r of n has experts r E/n …
(r + 1) E/n. Of a tensor [T, k, …] with a row for each expert that a token chose, a rank has the
rows of its experts. Its other rows have no meaning, and their gradient is zero. Of a tensor [T, n]
it has the rows of tokens that chose its experts, and a summand of their gradient. Where s ranks
share experts, ranks g s … g s + s - 1 have experts g E s/n … (g + 1) E s/n, each a part of their
features. A bias of summed features is whole on the first of them and zeros on the others (~d+).

gather, scatter, dispatch and collect apply to tokens, in parts of `part_of_tokens` rows (sequence
parallelism: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
§4.2.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from pcg.ir.types import TOKENS, Dim, State, TensorType, part_of_tokens


class Layout(NamedTuple):
    """A layout of a tensor over the ranks.

    Attributes:
        state: the state of the tensor, or of its partitioned dim.
        dim: the partitioned dim, counted from the end (-1 is the last), or the dim of a weight that
            experts share; 0 for none.
        sharers: the number of consecutive ranks that share experts.
        part: the dim that they hold parts of; 0 for none, of weights that they hold as summands.
    """

    state: State
    dim: int = 0
    sharers: int = 1
    part: int = 0

    def __str__(self) -> str:
        shared = f"|{self.part}" if self.part else "+" * (self.sharers > 1)
        return f"{self.state.value}{self.dim or ''}{shared}"

    def cuts(self, degree: int) -> tuple[tuple[int, int], ...]:
        """Return the dims of which `degree` ranks hold parts, each with the number of parts."""
        every = (self.dim, degree // self.sharers), (self.part, self.sharers)
        return tuple(cut for cut in every if cut[0])

    def of(self, type_: TensorType, degree: int) -> TensorType:
        """Return the type in this layout over `degree` ranks; without a dim mark the first."""
        if self.state is State.WHOLE or degree == 1:
            return type_
        dims = list(type_.dims) or [Dim(1)]
        at = len(dims) + self.dim if self.dim else 0
        dims[at] = Dim(dims[at].size, self.state, degree // self.sharers)
        if self.sharers > 1:
            at, state = (self.part, State.PARTITIONED) if self.part else (-2, State.PRE_REDUCE)
            dims[at] = Dim(dims[at].size, state, self.sharers)
        return dataclasses.replace(type_, dims=tuple(dims))

    def fits(self, type_: TensorType, degree: int) -> bool:
        """Return whether a tensor of this type has equal parts in this layout."""
        cuts = self.cuts(degree)
        if any(len(type_.dims) < -dim for dim, _ in cuts):
            return False
        sizes = ((type_.shape[dim], count) for dim, count in cuts)
        return all(not isinstance(size, int) or size % count == 0 for size, count in sizes)


WHOLE = Layout(State.WHOLE)
REPLICATED = Layout(State.REPLICATED)
PRE_REDUCE = Layout(State.PRE_REDUCE)
ROUTED = Layout(State.ROUTED)


@lru_cache(maxsize=64)
def partitioned(dim: int) -> Layout:
    """Return the layout of parts of a dim, counted from the end."""
    return Layout(State.PARTITIONED, dim)


@lru_cache(maxsize=64)
def of_experts(dim: int, sharers: int = 1, part: int = 0) -> Layout:
    """Return the layout of a weight of experts that share a dim, counted from the end."""
    return Layout(State.ROUTED, dim, sharers, part)


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
    """Return the type of a rank's part.

    A symbolic rank is a multiple of the degree; that of experts is each expert's, which stays.
    """
    sizes, cuts = list(type_.shape), layout.cuts(degree)
    for dim, count in cuts:
        size = sizes[dim]
        if isinstance(size, int):
            sizes[dim] = size // count
        elif layout.state is not State.ROUTED:
            sizes[dim] = part_of_tokens(count) if size == TOKENS else size / count
    return type_.with_shape(tuple(sizes)) if cuts else type_


def parts_of_experts(layouts: Iterable[Layout], degree: int) -> int:
    """Return the number of parts of experts that an operator's weights are in; 1 for whole."""
    parts = (degree // at.sharers for at in layouts if at.state is State.ROUTED and at.dim)
    return max(parts, default=1)


def dual(layout: Layout) -> Layout:
    """Return the layout of a tensor's gradient."""
    pair = {State.REPLICATED: PRE_REDUCE, State.PRE_REDUCE: REPLICATED}
    return pair.get(layout.state, layout)


def layout_of(type_: TensorType) -> Layout:
    """Return the layout of a type; the inverse of `Layout.of`."""
    marked = {d.state: at - len(type_.dims) for at, d in enumerate(type_.dims) if d.degree > 1}
    if State.ROUTED in marked:
        at = marked.pop(State.ROUTED)
        sharers = next((type_.dims[other].degree for other in marked.values()), 1)
        part = marked.get(State.PARTITIONED, 0)
        return of_experts(0 if type_.is_token_wise else at, sharers, part)
    for state, at in marked.items():
        return Layout(state, at if state is State.PARTITIONED else 0)
    return WHOLE


def whole_type(type_: TensorType) -> TensorType:
    """Return the type without its layout."""
    return type_.with_shape(type_.shape)

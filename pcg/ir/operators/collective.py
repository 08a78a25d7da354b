"""Parallelization operators, and the collectives that they are on a rank.

A parallel computation graph has the transitions, on the left, whose types say how ranks hold a
tensor (`pcg.ir.layouts`; Unity and FlexLLM §5.1); a rank's own graph has the operators on the right
in their place, and theirs are in its backward:

    replicate    - → =     replicate      backward: all_reduce
    reduce       + → -     all_reduce     backward: replicate
    partition    - → |d    own_part       backward: all_gather
    combine      |d → -    all_gather     backward: own_part
    take         = → |d    taken_part     backward: placed_part
    place        |d → +    placed_part    backward: taken_part
    scatter      + → |d    reduce_scatter backward: all_gather
    gather       |d → =    gathered_copy  backward: reduce_scatter

take and place move nothing: of a tensor that all ranks hold each can take its part, and a part
among zeros is a summand of the whole. scatter and gather are of the token dim alone.

Parts of the token dim are of as many rows on all ranks (`pcg.parallel.ranks.token_shards`): where
the ranks are no divisor of T, the last rows are zeros, which a whole tensor is without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Layout, partitioned
from pcg.ir.operators.operator import Attributes, Gradient, Operator, Types
from pcg.ir.types import TOKENS, Size, TensorType, counts_tokens, part_of_tokens


class Transition(Operator):
    """The same tensor, held otherwise; it has no shardings of its own.

    A graph with layouts does not run; the ranks' own, where it is a collective, do.
    """

    executable = False
    before: ClassVar[Layout | None] = WHOLE
    after: ClassVar[Layout | None] = WHOLE
    """Layouts; None for parts of the dim that the attribute `dim` names."""

    def layouts(self, attributes: Attributes) -> tuple[Layout, Layout]:
        """What it takes, and what it gives."""
        dim = cast("int", attributes.get("dim", 0))
        return self.before or partitioned(dim), self.after or partitioned(dim)


class Replicate(Transition):
    """x, of which each rank has a part of the gradient from here on."""

    name = "replicate"
    executable = True
    is_view = True
    after = REPLICATED

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return inputs[0]

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("all_reduce", context.incoming)]


class Reduce(Transition):
    """The sum of what the ranks hold."""

    name = "reduce"
    before = PRE_REDUCE


class Partition(Transition):
    """An equal part for each rank of dim `dim`, counted from the end."""

    name = "partition"
    after = None


class Combine(Transition):
    """The ranks' parts of dim `dim`, joined."""

    name = "combine"
    before = None


class Take(Transition):
    """A rank's part of dim `dim` of what each holds a copy of."""

    name = "take"
    before = REPLICATED
    after = None


class Place(Transition):
    """A rank's part of dim `dim` among zeros: a summand."""

    name = "place"
    before = None
    after = PRE_REDUCE


class Scatter(Transition):
    """A rank's part of the tokens, dim `dim`, of the sum of what the ranks hold."""

    name = "scatter"
    before = PRE_REDUCE
    after = None


class Gather(Transition):
    """The ranks' parts of the tokens joined: a copy on each, which has a part of the gradient."""

    name = "gather"
    before = None
    after = REPLICATED


FLOPS_PER_BYTE = 1000
"""Operations in the time of a byte between ranks, where no device is known: an A100, of 312 TFLOP/s
in bf16 and 300 GB/s of NVLink each way, has 1,040; an H100 has 2,199. Over PCIe they are 9,750 and
15,461 (sheets of `pcg.parallel.costs.accelerators`)."""


class Collective(Operator):
    """What ranks do together; making its result again takes as long as so many operations."""

    is_product = True
    rounds: ClassVar[int] = 1
    """How often a ring passes the output round: once to gather it, twice to sum it."""
    holds_inputs: ClassVar[bool] = True
    """Whether what it reads, or as much, is held until all has come; a sum is made in a copy."""

    def begun_source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        """As `source`, for what begins it: called, that waits for it and gives the result."""
        return self.source(inputs, attributes).replace("(", ".begin(", 1)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return FLOPS_PER_BYTE * self.rounds * outputs[0].size_bytes


class AllReduce(Collective):
    """The sum of the ranks' tensors, on each."""

    name = "all_reduce"
    rounds = 2
    holds_inputs = False

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_reduce({inputs[0]}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.incoming]


class OwnPart(Operator):
    """The rank's part of dim `dim`, one of `degree` equal ones; `tokens` says that it is theirs.

    `kept` says that it is kept for backward: then it is a copy, since a view would keep the whole.
    """

    name = "own_part"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if attributes.get("kept", True) is not True:
            raise TypeCheckError(f"the attribute kept of {self.name} is True or missing")
        return (_parted(types, attributes),)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return sympy.Integer(0)  # PyTorch gives a view

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        kept = ", kept=True" if attributes.get("kept") else ""
        return f"K.own_part({inputs[0]}, {_part_arguments(attributes)}{kept})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("all_gather", context.incoming, **context.attributes)]


class TakenPart(OwnPart):
    """The rank's part of a copy: the other ranks' parts have gradients of their own."""

    name = "taken_part"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("placed_part", context.incoming, **context.attributes)]


class AllGather(Collective):
    """The parts of `degree` ranks, joined along dim `dim`; `tokens` says that it is theirs."""

    name = "all_gather"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (_joined(types, attributes),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_gather({inputs[0]}, {_part_arguments(attributes)})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Every rank's rows, before they are joined.
        rows = cast("int", attributes["degree"]) * inputs[0].size_bytes
        return rows if attributes.get("tokens") else sympy.Integer(0)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("own_part", context.incoming, **context.attributes)]


class PlacedPart(AllGather):
    """The rank's part among zeros, where the others' are."""

    name = "placed_part"
    is_product = False
    rounds = 0

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].size_bytes + outputs[0].size_bytes  # zeros, then the part over them

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.placed_part({inputs[0]}, {_part_arguments(attributes)})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("taken_part", context.incoming, **context.attributes)]


class GatheredCopy(AllGather):
    """The parts of `degree` ranks of the tokens, joined; each copy has a part of the gradient.

    It is not kept for backward, which gathers it again where it reads it: kept whole on each rank
    it would be all that is spared (Korthikanti et al. 2022, §4.2.2).
    """

    name = "gathered_copy"
    is_product = False

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {k: v for k, v in context.attributes.items() if k != "tokens"}
        return [context.add("reduce_scatter", context.incoming, **attributes)]


class ReduceScatter(Collective):
    """The rank's part of the tokens, one of `degree` along dim `dim`, of the sum of all tensors."""

    name = "reduce_scatter"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (_parted(types, {**attributes, "tokens": True}),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.reduce_scatter({inputs[0]}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("all_gather", context.incoming, tokens=True, **context.attributes)]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return FLOPS_PER_BYTE * inputs[0].size_bytes


def _parted(types: Types, attributes: Attributes) -> TensorType:
    """What one rank has of a tensor."""
    dim, degree = _dim_and_degree(types, attributes, TOKENS)
    sizes = list(types[0].shape)
    size = sizes[dim]
    if isinstance(size, int) and size % degree:
        raise TypeCheckError(f"{types[0]}: {degree} does not divide dim {dim}")
    if size == TOKENS:
        sizes[dim] = part_of_tokens(degree)
    else:
        sizes[dim] = size // degree if isinstance(size, int) else size / degree
    return types[0].with_shape(tuple(sizes))


def _joined(types: Types, attributes: Attributes) -> TensorType:
    """What the ranks' parts are together."""
    degree = cast("int", attributes["degree"])
    dim, degree = _dim_and_degree(types, attributes, part_of_tokens(degree))
    sizes = list(types[0].shape)
    sizes[dim] = TOKENS if counts_tokens(sizes[dim]) else sizes[dim] * degree
    return types[0].with_shape(tuple(sizes))


def _dim_and_degree(types: Types, attributes: Attributes, tokens: Size) -> tuple[int, int]:
    """The dim and the degree, checked; `tokens` is the size that a token dim has to have."""
    dim, degree = cast("int", attributes["dim"]), cast("int", attributes["degree"])
    if not -len(types[0].dims) <= dim < 0 or degree < 2:
        raise TypeCheckError(f"{types[0]} has no {degree} parts of dim {dim}")
    size = types[0].shape[dim]
    if attributes.get("tokens", False) != counts_tokens(size) or (
        counts_tokens(size) and size != tokens
    ):
        raise TypeCheckError(
            f"dim {dim} of {types[0]} is of size {size}; of tokens it is {tokens}, and the "
            "attribute tokens is True, else it is missing"
        )
    return dim, degree


def _part_arguments(attributes: Attributes) -> str:
    return f"{attributes['dim']}, batch" + (", tokens=True" if attributes.get("tokens") else "")


OPERATORS: tuple[Operator, ...] = (
    AllGather(),
    AllReduce(),
    Combine(),
    Gather(),
    GatheredCopy(),
    OwnPart(),
    Partition(),
    Place(),
    PlacedPart(),
    Reduce(),
    ReduceScatter(),
    Replicate(),
    Scatter(),
    Take(),
    TakenPart(),
)

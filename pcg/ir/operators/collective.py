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

The last two move nothing: of a tensor that all ranks hold each can take its part, and a part among
zeros is a summand of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Layout, partitioned
from pcg.ir.operators.operator import Attributes, Gradient, Operator, Types


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


FLOPS_PER_BYTE = 1000
"""Operations in the time of a byte between ranks, where no device is known: an A100, of 312 TFLOP/s
in bf16 and 300 GB/s of NVLink each way, has 1,040; an H100 has 2,199. Over PCIe they are 9,750 and
15,461 (sheets of `pcg.parallel.devices`)."""


class Collective(Operator):
    """What ranks do together; making its result again takes as long as so many operations."""

    is_product = True
    rounds: ClassVar[int] = 1
    """How often a ring passes the output round: once to gather it, twice to sum it."""

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return FLOPS_PER_BYTE * self.rounds * outputs[0].size_bytes


class AllReduce(Collective):
    """The sum of the ranks' tensors, on each."""

    name = "all_reduce"
    rounds = 2

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_reduce({inputs[0]}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.incoming]


class OwnPart(Operator):
    """The rank's part of dim `dim`, one of `degree` equal ones."""

    name = "own_part"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim, degree = _dim_and_degree(types, attributes)
        sizes = list(types[0].shape)
        size = sizes[dim]
        if isinstance(size, int) and size % degree:
            raise TypeCheckError(f"own_part of {types[0]}: {degree} does not divide dim {dim}")
        sizes[dim] = size // degree if isinstance(size, int) else size / degree
        return (types[0].with_shape(tuple(sizes)),)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return sympy.Integer(0)  # PyTorch gives a view

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.own_part({inputs[0]}, {attributes['dim']}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("all_gather", context.incoming, **context.attributes)]


class TakenPart(OwnPart):
    """The rank's part of a copy: the other ranks' parts have gradients of their own."""

    name = "taken_part"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("placed_part", context.incoming, **context.attributes)]


class AllGather(Collective):
    """The parts of `degree` ranks, joined along dim `dim`."""

    name = "all_gather"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim, degree = _dim_and_degree(types, attributes)
        sizes = list(types[0].shape)
        sizes[dim] *= degree
        return (types[0].with_shape(tuple(sizes)),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_gather({inputs[0]}, {attributes['dim']}, batch)"

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
        return f"K.placed_part({inputs[0]}, {attributes['dim']}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("taken_part", context.incoming, **context.attributes)]


def _dim_and_degree(types: Types, attributes: Attributes) -> tuple[int, int]:
    dim, degree = cast("int", attributes["dim"]), cast("int", attributes["degree"])
    if not -len(types[0].dims) <= dim < 0 or degree < 2:
        raise TypeCheckError(f"{types[0]} has no {degree} parts of dim {dim}")
    return dim, degree


OPERATORS: tuple[Operator, ...] = (
    AllGather(),
    AllReduce(),
    Combine(),
    OwnPart(),
    Partition(),
    Place(),
    PlacedPart(),
    Reduce(),
    Replicate(),
    Take(),
    TakenPart(),
)

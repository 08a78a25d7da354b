"""Parallelization operators, and a rank's collectives that replace them.

A parallel computation graph has the transitions on the left, whose types state how ranks hold a
tensor (`pcg.ir.layouts`; Unity and FlexLLM §5.1). A rank's graph has the operators on the right,
and their gradients in its backward:

    replicate    - → =     replicate      backward: all_reduce
    reduce       + → -     all_reduce     backward: replicate
    partition    - → |d    own_part       backward: all_gather
    combine      |d → -    all_gather     backward: own_part
    take         = → |d    taken_part     backward: placed_part
    place        |d → +    placed_part    backward: taken_part
    scatter      + → |d    reduce_scatter backward: all_gather
    gather       |d → =    gathered_copy  backward: reduce_scatter
    route        = → ~     route          backward: route
    dispatch     |d → ~    dispatched     backward: collected
    collect      ~ → |d    collected      backward: dispatched

take and place send nothing: a part among zeros is a summand of the whole. scatter and gather apply
only to the token dim, with equal rows on all ranks: if the number of ranks does not divide T, the
last rows are zeros (`pcg.ranks.step_parts`). dispatch and collect are all-to-alls: a rank's tokens
are sent to the ranks with experts that they chose, and rows of chosen experts back to their tokens.

`coalesce_collectives` joins several tensors into a single message, all_reduces or all_gathers, as a
message's latency for each step of its ring does not depend on its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, ROUTED, WHOLE, Layout, partitioned
from pcg.ir.operators.base import (
    COUNT,
    DIM,
    PRESENT,
    SIZES,
    Attributes,
    Gradient,
    Operator,
    Types,
    declared,
    integer,
)
from pcg.ir.types import TOKENS, Size, TensorType, counts_tokens, part_of_tokens


class Transition(Operator):
    """The same tensor in another layout; it has no shardings of its own.

    A graph with layouts does not run; a rank's graph, which has collectives instead, does.
    """

    executable = False
    before: ClassVar[Layout | None] = WHOLE
    after: ClassVar[Layout | None] = WHOLE
    """Layouts of its input and output; None for parts of the dim in the attribute `dim`."""

    def layouts(self, attributes: Attributes) -> tuple[Layout, Layout]:
        dim = attributes.get("dim", 0)
        return self.before or partitioned(dim), self.after or partitioned(dim)

    @classmethod
    def between(cls, name: str, before: Layout | None, after: Layout | None) -> Transition:
        attributes = {} if before and after else {"dim": DIM}
        attributes |= {"experts": COUNT} if issubclass(cls, AllToAll) else {}
        fields = {
            "name": name,
            "attributes": declared(**attributes),
            "before": before,
            "after": after,
        }
        transition: Transition = type(name, (cls,), fields)()
        return transition


class Replicate(Transition):
    """x; each rank has a part of its gradient from here on."""

    name = "replicate"
    adjoint = "all_reduce"
    template = "{0}"
    executable = True
    is_view = True
    after = REPLICATED


class AllToAll(Transition):
    """x of a rank's tokens to the ranks of their experts, or back; the indices tell which."""

    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (_check_routed(types, TOKENS),)


class Route(Transition):
    """x, of which each rank reads the rows of its experts; the gradient of others is zero."""

    name = "route"
    adjoint = "route"
    template = "{0}"
    executable = True
    is_view = True
    before = REPLICATED
    after = ROUTED


TRANSITIONS = tuple(
    Transition.between(name, before, after)
    for name, before, after in (
        ("reduce", PRE_REDUCE, WHOLE),
        ("partition", WHOLE, None),
        ("combine", None, WHOLE),
        ("take", REPLICATED, None),
        ("place", None, PRE_REDUCE),
        ("scatter", PRE_REDUCE, None),
        ("gather", None, REPLICATED),
    )
) + tuple(
    AllToAll.between(name, before, after)
    for name, before, after in (("dispatch", None, ROUTED), ("collect", ROUTED, None))
)
"""The other transitions, with layouts of input and output; None for parts of dim `dim`."""

FLOPS_PER_BYTE = 1000
"""Operations in the time of a byte between ranks, without a known device: an A100, of 312 TFLOP/s
in bf16 and 300 GB/s of NVLink each way, has 1,040; an H100 has 2,199. Over PCIe they are 9,750 and
15,461 (`pcg.parallel.costs.accelerators`)."""


_DEGREE = integer(2)


class Collective(Operator):
    """Communication of all ranks; its cost is the FLOPs that fit into its time."""

    is_product = True
    rounds: ClassVar[int] = 1
    """The number of passes of the output around a ring: 1 to gather it, 2 to sum it."""
    holds_inputs: ClassVar[bool] = True
    """True if as much memory as its inputs is held until it completes; a sum works on a copy."""

    def begun_source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        """Return the expression that starts it; a call of the value waits for the result."""
        return self.source(inputs, attributes).replace("(", ".begin(", 1)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return FLOPS_PER_BYTE * self.rounds * _bytes(outputs)


class AllReduce(Collective):
    """The sum of the ranks' tensors, on each."""

    name = "all_reduce"
    template = "K.{name}({inputs}, batch)"
    rounds = 2
    holds_inputs = False

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.incoming]


class OwnPart(Operator):
    """The rank's part of dim `dim`, one of `degree` equal parts; with `tokens`, of the tokens.

    With `kept` it is saved for backward: then it is a copy, as a view would keep the whole.
    """

    name = "own_part"
    attributes = declared(dim=DIM, degree=_DEGREE, tokens=PRESENT, kept=PRESENT)
    adjoint = "all_gather"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (_parted(types, attributes),)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return sympy.Integer(0)  # PyTorch returns a view

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        kept = ", kept=True" if attributes.get("kept") else ""
        return f"K.own_part({_part_arguments(inputs, attributes)}{kept})"


class TakenPart(OwnPart):
    """The rank's part of a copy: the other ranks' parts have gradients of their own."""

    name = "taken_part"
    adjoint = "placed_part"


class AllGather(Collective):
    """The parts of `degree` ranks, joined along dim `dim`; with `tokens`, of the tokens.

    With `logits` they are a step's logits, which the batch may need only on the first rank.
    """

    name = "all_gather"
    attributes = declared(dim=DIM, degree=_DEGREE, tokens=PRESENT, logits=PRESENT)
    adjoint = "own_part"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (_joined(types, attributes),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        logits = ", logits=True" if attributes.get("logits") else ""
        return f"K.all_gather({_part_arguments(inputs, attributes)}{logits})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Every rank's rows, before they are joined.
        rows = attributes["degree"] * inputs[0].size_bytes
        return rows if attributes.get("tokens") else sympy.Integer(0)


class PlacedPart(AllGather):
    """The rank's part, with zeros in place of the other parts."""

    name = "placed_part"
    attributes = declared(dim=DIM, degree=_DEGREE, tokens=PRESENT)
    adjoint = "taken_part"
    is_product = False
    rounds = 0

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].size_bytes + outputs[0].size_bytes  # zeros, then the part over them

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.placed_part({_part_arguments(inputs, attributes)})"


class GatheredCopy(AllGather):
    """The parts of `degree` ranks of the tokens, joined; each copy has a part of the gradient.

    It is not saved for backward, which gathers it again: the whole on each rank would undo the
    savings of sequence parallelism (Korthikanti et al. 2022, §4.2.2).
    """

    name = "gathered_copy"
    attributes = PlacedPart.attributes
    is_product = False

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_gather({_part_arguments(inputs, attributes)})"

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {k: v for k, v in context.attributes.items() if k != "tokens"}
        return [context.add("reduce_scatter", context.incoming, **attributes)]


class ReduceScatter(Collective):
    """The rank's part of the tokens, one of `degree` along dim `dim`, of the sum of all tensors."""

    name = "reduce_scatter"
    attributes = declared(dim=DIM, degree=_DEGREE)
    template = "K.{name}({inputs}, batch)"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (_parted(types, {**attributes, "tokens": True}),)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("all_gather", context.incoming, tokens=True, **context.attributes)]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return FLOPS_PER_BYTE * inputs[0].size_bytes


class Dispatched(Collective):
    """Rows of all tokens that chose an expert of the rank, among zeros.

    `x: [P, in]` or `[P, k, in]` of a rank's tokens, `indices: [T, k]` of all. Each of `degree`
    ranks has `experts` experts. A row of a choice goes to the rank of its expert.
    """

    name = "dispatched"
    inputs = (2, 2)
    attributes = declared(degree=_DEGREE, experts=COUNT)
    template = "K.{name}({inputs}, {experts}, batch)"
    constant_in = (1,)
    counts_on_host = True
    adjoint = "collected"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x = _check_routed(types, part_of_tokens(attributes["degree"]))
        return (x.with_shape((TOKENS, *x.shape[1:])),)

    def gradient(self, context: Gradient) -> list[str | None]:
        arguments = context.incoming, context.input(1)
        return [context.add(self.adjoint, *arguments, **context.attributes), None]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        x, indices = inputs
        message = exchanged(x, indices.features[-1], attributes["degree"])
        return FLOPS_PER_BYTE * message.size_bytes

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The rows that are sent and received, in the worst case all.
        x, indices = inputs
        ranks = min(attributes["degree"], indices.features[-1]) if len(x.dims) == 2 else 1
        part, whole = sorted((x, outputs[0]), key=lambda type_: type_.shape[0] == TOKENS)
        return ranks * part.size_bytes + whole.size_bytes


class Collected(Dispatched):
    """A rank's tokens' rows, sums of those that the ranks of their experts have.

    `x: [T, in]` or `[T, k, in]`, whose rows for other ranks' experts are not read.
    """

    name = "collected"
    adjoint = "dispatched"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x = _check_routed(types, TOKENS)
        return (x.with_shape((part_of_tokens(attributes["degree"]), *x.shape[1:])),)


def _check_routed(types: Types, rows: Size) -> TensorType:
    """Return the type of rows of tokens or of their choices, if it fits the indices."""
    x, indices = types
    is_index = len(indices.dims) == 2 and indices.shape[0] == TOKENS and not indices.is_float
    is_fit = x.is_float and x.shape[:1] == (rows,) and len(x.dims) in (2, 3)
    if not is_index or not is_fit or (len(x.dims) == 3 and x.shape[1] != indices.shape[1]):
        raise TypeCheckError(f"rows {x} do not fit the experts' indices {indices}, of {rows} rows")
    return x


def exchanged(type_: TensorType, choices: int, degree: int) -> TensorType:
    """Return the rows that a rank sends in an all-to-all, its own among them, on average.

    Rows of choices [T, k, …] have a rank each. A token chooses experts of n (1 - (1 - 1/n)^k) ranks
    if all are chosen equally often.
    """
    ranks = sympy.Rational(degree) * (1 - (1 - sympy.Rational(1, degree)) ** choices)
    rows = part_of_tokens(degree) * (ranks if len(type_.dims) == 2 else 1)
    return type_.with_shape((rows, *type_.shape[1:]))


def _parted(types: Types, attributes: Attributes) -> TensorType:
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
    dim, degree = _dim_and_degree(types, attributes, part_of_tokens(attributes["degree"]))
    sizes = list(types[0].shape)
    sizes[dim] = TOKENS if counts_tokens(sizes[dim]) else sizes[dim] * degree
    return types[0].with_shape(tuple(sizes))


def _dim_and_degree(types: Types, attributes: Attributes, tokens: Size) -> tuple[int, int]:
    """Check and return dim and degree; `tokens` is the required size of a token dim."""
    dim, degree = attributes["dim"], attributes["degree"]
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


def _part_arguments(inputs: Sequence[str], attributes: Attributes) -> str:
    tokens = ", tokens=True" if attributes.get("tokens") else ""
    return f"{inputs[0]}, {attributes['dim']}, batch{tokens}"


MOST_JOINED = 4096
"""Maximum number of tensors of a message; no layer has more."""


class JoinedCollective(Collective):
    """A message of several tensors of the same dtype."""

    inputs = (2, MOST_JOINED)

    def _check(self, types: Types) -> None:
        dtypes = {type_.dtype for type_ in types}
        if len(dtypes) > 1:
            raise TypeCheckError(f"{self.name} of {', '.join(sorted(dtypes))}; use one dtype")


class AllReduces(JoinedCollective):
    """The sums of the ranks' tensors, on each."""

    name = "all_reduces"
    template = "K.{name}([{inputs}], batch)"
    rounds = AllReduce.rounds
    holds_inputs = False

    def infer(self, types: Types, attributes: Attributes) -> Types:
        self._check(types)
        return types

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * _bytes(inputs)  # sent and received tensors

    def gradient(self, context: Gradient) -> list[str | None]:
        return list(context.upstream)


class AllGathers(JoinedCollective):
    """The parts of `degree` ranks, each tensor's joined along its own of `dims`."""

    name = "all_gathers"
    attributes = declared(dims=SIZES, degree=_DEGREE)
    template = "K.{name}([{inputs}], {dims}, batch)"
    rounds = AllGather.rounds

    def infer(self, types: Types, attributes: Attributes) -> Types:
        self._check(types)
        dims, degree = attributes["dims"], attributes["degree"]
        if len(dims) != len(types):
            raise TypeCheckError(f"all_gathers of {len(types)} tensors along {len(dims)} dims")
        pairs = zip(types, dims, strict=True)
        return tuple(_joined((type_,), {"dim": dim, "degree": degree}) for type_, dim in pairs)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _bytes(inputs) + _bytes(outputs)  # sent and received tensors

    def gradient(self, context: Gradient) -> list[str | None]:
        dims, degree = context.attributes["dims"], context.attributes["degree"]
        return [
            None if d is None else context.add("own_part", d, dim=dim, degree=degree)
            for d, dim in zip(context.upstream, dims, strict=True)
        ]


def _bytes(types: Types) -> sympy.Expr:
    return sympy.Add(*(type_.size_bytes for type_ in types))

"""Linear operators of mixtures of experts: each token is multiplied by the experts that it chose.

    y[t, j] = W[e] x[t] (+ b[e]),  e = indices[t, j]

Rows stay in the order of the tokens; kernels group them by expert. A mixture is two such operators
with a gate between them, weighted by the router and summed over j.

LoRA on experts has a pair of matrices for each expert, in peft's layout: rows e r + i of A
[E r, in] and columns i E + e of B [out, r E] are those of expert e (peft 0.21.2, `ParamWrapper`).

    s[t, j] = A[e] x[t]                  z[t, j] = y[t, j] + scale · B[e] s[t, j]

The operators of a rank that has one of `parts` equal parts of the experts compute the rows of its
experts, of which `experts` is the number; indices count all ranks' experts. Other rows are zeros,
which makes the result a summand, too. Training saves the rank's R rows alone, of which R depends on
what the tokens choose:

    packed[i] = y[t, j]  of the rank's choices (t, j), by expert        R ≤ min(k, experts) T

With all experts chosen equally often, R = k T / parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    ROUTED,
    Sharding,
    of_experts,
    partitioned,
    sharding,
)
from pcg.ir.operators.base import (
    COUNT,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    cast_bytes,
    declared,
    integer,
    optional,
)
from pcg.ir.types import Size, TensorType


def _chosen_by(indices: TensorType, rows: TensorType) -> bool:
    """Return whether indices [T, k] fit rows [T, in], or [T, k, in]."""
    fits = len(indices.dims) == 2 and indices.is_token_wise and not indices.is_float
    return fits and rows.shape[:-1] in (indices.shape[:1], indices.shape)


def _rows_bytes(*types: TensorType) -> sympy.Expr:
    """Return the bytes of an expert's rows of some tensors [T, n] or [T, k, n].

    In the worst case all tokens choose the same expert.
    """
    sizes = (type_.size_bytes / type_.elements * type_.shape[-1] for type_ in types)
    return sympy.Add(*sizes) * types[0].shape[0]


_PARTS = optional(integer(2))


def _parts(attributes: Attributes) -> dict[str, int]:
    """Return the attribute of a rank's operator; empty if the rank has all experts."""
    return {"parts": attributes["parts"]} if "parts" in attributes else {}


class Routed(Operator):
    """An operator on rows by the experts that they chose."""

    counts_on_host = True

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        source = super().source(inputs, attributes)
        if "parts" not in attributes:
            return source
        return f"{source[:-1]}, part=K.part_of_rank(batch.ranks, {attributes['parts']}))"

    def local_attributes(
        self, attributes: Attributes, outputs: Types, parts: int = 1
    ) -> Attributes:
        if parts == 1:
            return attributes
        experts = {"experts": attributes["experts"] // parts} if "experts" in attributes else {}
        return {**attributes, **experts, "parts": parts}


def _moved(types: Types, parts: int, *, written: bool = False) -> sympy.Expr:
    """Return the bytes that a rank with a part of the experts reads, or writes.

    Of rows of choices [T, k, n] it moves its part, and writes zeros to all first.
    """
    of_part = (
        type_.size_bytes / parts
        if type_.is_token_wise and len(type_.dims) > 2
        else type_.size_bytes
        for type_ in types
    )
    zeros = (type_.size_bytes for type_ in types if written and parts > 1 and type_.is_token_wise)
    return sympy.Add(*of_part, *zeros)


class OfExperts(Routed):
    """A product of rows, their experts' indices, and the experts' weights."""

    is_product = True
    attributes = declared(parts=_PARTS)
    computes_in_first = True

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The operator reads at most as many experts as tokens choose.
        rows, indices, *weights = inputs
        parts = attributes.get("parts", 1)
        share = sympy.Min(1, indices.elements / parts / weights[0].shape[0])
        tokens = _moved((rows, indices), parts) + _moved(outputs, parts, written=True)
        return tokens + share * sympy.Add(*(type_.size_bytes for type_ in weights))

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        chosen = inputs[1].elements / attributes.get("parts", 1)
        return 2 * chosen * inputs[2].elements / inputs[2].shape[0]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _rows_bytes(inputs[0], outputs[0])


class ExpertLinear(OfExperts):
    """y[t, j] = W[e] x[t] (+ b[e]) with e = indices[t, j], for each of k experts of a token.

    `x: [T, in]`, or `[T, k, in]` with a row for each expert, `indices: [T, k]`, `W: [E, out, in]`,
    `b: [E, out, 1]` give `[T, k, out]`.
    """

    name = "expert_linear"
    inputs = (3, 4)
    constant_in = (1, 2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, indices, weight, *bias = types
        if not _chosen_by(indices, x):
            raise TypeCheckError(f"expert_linear of {x} with experts chosen by {indices}")
        if len(weight.dims) != 3 or weight.is_token_wise or weight.shape[-1] != x.shape[-1]:
            raise TypeCheckError(
                f"expert_linear of {x} by {weight}; expected [experts, out, {x.shape[-1]}]"
            )
        if bias and bias[0].shape != (*weight.shape[:2], 1):
            raise TypeCheckError(f"expert_linear has weight {weight} but bias {bias[0]}")
        return (x.with_shape((*indices.shape, weight.shape[1])),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (0, 0, *(-2,) * (len(types) - 2)), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        bias = (PRE_REDUCE,) * (len(types) - 3)
        for x, weight in ((partitioned(-1), partitioned(-1)), (PRE_REDUCE, REPLICATED)):
            yield sharding(x, REPLICATED, weight, *bias, PRE_REDUCE)
        of_rank = (of_experts(-3),) * (len(types) - 2)
        for x in (REPLICATED, ROUTED):
            for y in (ROUTED, PRE_REDUCE):
                yield sharding(x, REPLICATED, *of_rank, y)

    def gradient(self, context: Gradient) -> list[str | None]:
        indices, weight = context.inputs[1:3]
        parts = _parts(context.attributes)
        dx = context.add("expert_linear_backward", context.incoming, indices, weight, **parts)
        if len(context.input_type(0).dims) == 2:
            dx = context.add("sum", dx, dim=-2, keepdim=False)
        return [dx, *(None,) * (len(context.node.inputs) - 1)]


class PackRows(Routed):
    """The rows [R, n] of a rank's experts, among zeros in `x: [T, k, n]`; `indices: [T, k]`.

    The type has the most rows that a token can have, `[T, min(k, experts), n]`.
    """

    name = "pack_rows"
    inputs = (2, 2)
    attributes = declared(experts=COUNT, parts=integer(2))
    template = "K.{name}({inputs}, experts={experts})"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, indices = types
        if not _chosen_by(indices, x) or len(x.dims) != 3:
            raise TypeCheckError(f"pack_rows of {x}, of experts {indices}")
        most = min(indices.features[0], attributes["experts"])
        return (x.with_shape((x.shape[0], most, x.shape[2])),)


class UnpackRows(PackRows):
    """x [T, k, n] of packed rows, typed `[T, min(k, experts), n]`, and `indices: [T, k]`."""

    name = "unpack_rows"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        rows, indices = types
        x = rows.with_shape((*indices.shape, rows.shape[-1]))
        (packed,) = super().infer((x, indices), attributes)
        if rows.shape != packed.shape:
            raise TypeCheckError(f"unpack_rows of {rows}, of experts {indices}; expected {packed}")
        return (x,)


class ExpertLinearBackward(OfExperts):
    """dx[t, j] = W[e]ᵀ dy[t, j], the input gradient of `expert_linear` for each expert of a token.

    `dy: [T, k, out]`, `indices: [T, k]`, `W: [E, out, in]` give `[T, k, in]`.
    """

    name = "expert_linear_backward"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, indices, weight = types
        fits = _chosen_by(indices, dy) and len(dy.dims) == 3 and len(weight.dims) == 3
        if not fits or weight.is_token_wise or weight.shape[1] != dy.shape[-1]:
            raise TypeCheckError(f"gradient {dy} does not fit weight {weight} of {indices}")
        return (dy.with_shape((*indices.shape, weight.shape[2])),)


class OfExpertLora(Routed):
    """A product by the LoRA of experts; `experts` is their number."""

    is_product = True
    attributes = declared(experts=COUNT, parts=_PARTS)
    template = "K.{name}({inputs}, experts={experts})"

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        parts = attributes.get("parts", 1)
        return _moved(inputs, parts) + _moved(outputs, parts, written=True)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        rows = next(type_ for type_ in inputs if not type_.is_float)
        matrix = max((*inputs, *outputs), key=lambda type_: not type_.is_token_wise)
        chosen = rows.elements / attributes.get("parts", 1)
        return 2 * chosen * matrix.elements / attributes["experts"]


def _rank(size: Size, experts: int) -> Size:
    """Return the rank of an expert's matrices; open ranks of serving stay."""
    if not isinstance(size, int):
        return size
    if size % experts:
        raise TypeCheckError(f"{experts} experts do not share {size} ranks equally")
    return size // experts


class ExpertShrink(OfExpertLora):
    """s[t, j] = A[e] x[t], in A's dtype: `x: [T, in]` or `[T, k, in]`, `indices: [T, k]`.

    `A: [E r, in]` gives `[T, k, r]`.
    """

    name = "expert_shrink"
    inputs = (3, 3)
    linear_in = ((0,), (2,))
    constant_in = (1,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, indices, weight = types
        fits = _chosen_by(indices, x) and len(weight.dims) == 2
        if not fits or weight.shape[-1] != x.shape[-1]:
            raise TypeCheckError(f"expert_shrink of {x} by {weight}, of experts {indices}")
        rank = _rank(weight.shape[0], attributes["experts"])
        return (weight.with_shape((*indices.shape, rank)),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        x, dtype = inputs[0], outputs[0].dtype
        return cast_bytes(x, dtype) + _rows_bytes(x.with_dtype(dtype), outputs[0])

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield sharding(partitioned(-1), REPLICATED, partitioned(-1), PRE_REDUCE)
        for x in (REPLICATED, ROUTED):
            yield sharding(x, REPLICATED, of_experts(-2), ROUTED)

    def gradient(self, context: Gradient) -> list[str | None]:
        dx, da = None, None
        indices, x = context.input(1), context.input_type(0)
        if context.needs[0]:
            arguments = (context.incoming, indices, context.input(2))
            dx = context.add("expert_shrink_backward", *arguments, **context.attributes)
            if len(x.dims) == 2:
                dx = context.add("sum", dx, dim=-2, keepdim=False)
            dx = context.cast(dx, x.dtype)
        if context.needs[2]:
            arguments = (context.incoming, indices, context.input(0))
            da = context.add("expert_outer", *arguments, **context.attributes)
        return [dx, None, da]


class ExpertShrinkBackward(OfExpertLora):
    """dx[t, j] = A[e]ᵀ ds[t, j]: `ds: [T, k, r]`, `indices: [T, k]`, `A: [E r, in]`."""

    name = "expert_shrink_backward"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        ds, indices, weight = types
        rank = _rank(weight.shape[0], attributes["experts"])
        if not _chosen_by(indices, ds) or ds.shape[-1] != rank:
            raise TypeCheckError(f"gradient {ds} does not fit {weight}, of experts {indices}")
        return (ds.with_shape((*indices.shape, weight.shape[-1])),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _rows_bytes(inputs[0], outputs[0])


class ExpertOuter(OfExpertLora):
    """dA[e] = Σ ds[t, j] x[t]ᵀ over the choices of e: `ds: [T, k, r]`, `indices: [T, k]`, x.

    `x: [T, in]` or `[T, k, in]` gives `[E r, in]`.
    """

    name = "expert_outer"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        ds, indices, x = types
        if not (_chosen_by(indices, ds) and _chosen_by(indices, x)) or len(ds.dims) != 3:
            raise TypeCheckError(f"expert_outer of {ds} and {x}, of experts {indices}")
        return (ds.with_shape((attributes["experts"] * ds.shape[-1], x.shape[-1])),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        ds, _, x = inputs
        rows = x.with_dtype(ds.dtype)
        return _rows_bytes(ds, rows) + (_rows_bytes(x) if x.dtype != ds.dtype else 0)


class ExpertExpandAdd(OfExpertLora):
    """z[t, j] = y[t, j] + scale · B[e] s[t, j], in y's dtype: `y: [T, k, out]`, `s: [T, k, r]`.

    `indices: [T, k]`, `B: [out, r E]`.
    """

    name = "expert_expand_add"
    inputs = (4, 4)
    linear_in = ((0, 1), (0, 3))
    constant_in = (2,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, s, indices, weight = types
        shapes = (*indices.shape, weight.shape[0]), (*indices.shape,)
        rank = _rank(weight.shape[-1], attributes["experts"])
        if (y.shape, (*s.shape[:-1],)) != shapes or s.shape[-1] != rank:
            raise TypeCheckError(
                f"expert_expand_add of {s} by {weight} onto {y}, of experts {indices}"
            )
        return (y,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, 0, 0, -2), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        for y in (ROUTED, PRE_REDUCE):
            yield sharding(y, ROUTED, REPLICATED, of_experts(-1), y)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        y, s = inputs[:2]
        rows = _rows_bytes(s, y.with_dtype(s.dtype))
        if y.dtype == s.dtype:
            return rows
        return cast_bytes(y, s.dtype) + sympy.Max(0, rows - y.size_bytes)

    def gradient(self, context: Gradient) -> list[str | None]:
        ds, db = None, None
        dz, indices, weight = context.incoming, context.input(2), context.input(3)
        if context.needs[1]:
            ds = context.add("expert_expand_backward", dz, indices, weight, **context.attributes)
        if context.needs[3]:
            arguments = (dz, indices, context.input(1), weight)
            db = context.add("expert_scaled_outer", *arguments, **context.attributes)
        return [dz if context.needs[0] else None, ds, None, db]


class ExpertExpandBackward(OfExpertLora):
    """ds[t, j] = scale · B[e]ᵀ dz[t, j], in B's dtype: `dz: [T, k, out]`, `B: [out, r E]`."""

    name = "expert_expand_backward"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, indices, weight = types
        if not _chosen_by(indices, dz) or dz.shape[-1] != weight.shape[0]:
            raise TypeCheckError(f"gradient {dz} does not fit {weight}, of experts {indices}")
        rank = _rank(weight.shape[-1], attributes["experts"])
        return (weight.with_shape((*indices.shape, rank)),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        dz, dtype = inputs[0], outputs[0].dtype
        return cast_bytes(dz, dtype) + _rows_bytes(dz.with_dtype(dtype), outputs[0])


class ExpertScaledOuter(OfExpertLora):
    """dB[e] = scale · Σ dz[t, j] s[t, j]ᵀ over the choices of e, in B's layout `[out, r E]`."""

    name = "expert_scaled_outer"
    inputs = (4, 4)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, indices, s, weight = types
        fits = _chosen_by(indices, dz) and _chosen_by(indices, s)
        if not fits or weight.shape != (dz.shape[-1], s.shape[-1] * attributes["experts"]):
            raise TypeCheckError(f"expert_scaled_outer of {dz} and {s}, of experts {indices}")
        return (weight.with_dtype(s.dtype),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        dz, _, s, _ = inputs
        rows = _rows_bytes(dz.with_dtype(s.dtype), s)
        rows += _rows_bytes(dz) if dz.dtype != s.dtype else 0
        return sympy.Max(rows, outputs[0].size_bytes)

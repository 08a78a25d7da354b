"""Linear operators of mixtures of experts: each token is multiplied by the experts that it chose.

    y[t, j] = W[e] x[t] (+ b[e]),  e = indices[t, j]

Rows stay in the order of the tokens; kernels group them by expert. A mixture is two such operators
with a gate between them, weighted by the router and summed over j.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, Sharding, partitioned, sharding
from pcg.ir.operators.base import Aligned, Attributes, Gradient, Operator, Types
from pcg.ir.types import TensorType


def _chosen_by(indices: TensorType, rows: TensorType) -> bool:
    """Return whether indices [T, k] fit rows [T, in], or [T, k, in]."""
    fits = len(indices.dims) == 2 and indices.is_token_wise and not indices.is_float
    return fits and rows.shape[:-1] in (indices.shape[:1], indices.shape)


class OfExperts(Operator):
    """A product of rows, their experts' indices, and the experts' weights."""

    is_product = True
    computes_in_first = True
    counts_on_host = True

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The operator reads at most as many experts as tokens choose.
        rows, indices, *weights = inputs
        share = sympy.Min(1, indices.elements / weights[0].shape[0])
        tokens = sympy.Add(*(type_.size_bytes for type_ in (rows, indices, *outputs)))
        return tokens + share * sympy.Add(*(type_.size_bytes for type_ in weights))

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[1].elements * inputs[2].elements / inputs[2].shape[0]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The rows of an expert and their product; in the worst case all tokens choose the same.
        widths = inputs[0].shape[-1] + outputs[0].shape[-1]
        return widths * inputs[0].size_bytes / inputs[0].elements * inputs[1].shape[0]


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

    def gradient(self, context: Gradient) -> list[str | None]:
        indices, weight = context.inputs[1:3]
        dx = context.add("expert_linear_backward", context.incoming, indices, weight)
        if len(context.input_type(0).dims) == 2:
            dx = context.add("sum", dx, dim=-2, keepdim=False)
        return [dx, *(None,) * (len(context.node.inputs) - 1)]


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

"""Vectors that bypass networks scale by or add, and their gradients.

They are *adapter* parameters: in a batch of many adapters each token uses its own adapter's vector,
and a token whose adapter has no parameter at the site passes unchanged.

Virtual tokens are rows of a batch outside the vocabulary. The batch knows the virtual rows, and the
index of each within its adapter's prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, Sharding, sharding
from pcg.ir.operators.base import (
    DTYPE,
    TEXT,
    Aligned,
    Attributes,
    Bounds,
    Gradient,
    Operator,
    Types,
    cast_bytes,
    declared,
    widened,
)
from pcg.ir.types import TOKENS, TORCH_NAMES, TensorType, promote

INNER_TOKENS = 64
"""Maximum number of tokens with products in memory at the same time, for a sum."""


def wider_bytes(y: TensorType, vector: TensorType) -> sympy.Expr:
    """Return the bytes of a result in a vector's wider dtype, before its cast to y's; else 0."""
    return cast_bytes(y, promote(y.dtype, vector.dtype))


class Scale(Operator):
    """z = l ⊙ (y - b) + b, in y's dtype: each token by its own adapter's l.

    `y: [T, n]`, `l: [n]`; `b: [n]`, an optional bias, is not scaled. Without b, y may be [T, …, n].
    """

    name = "scale"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, *vectors = types
        has_dims = len(y.dims) == 2 or (len(y.dims) > 2 and len(vectors) == 1)
        if not has_dims or any(vector.shape != y.shape[-1:] for vector in vectors):
            raise TypeCheckError(
                f"scale of {y} by {', '.join(map(str, vectors))}; expected [{y.shape[-1]}]"
            )
        return (y,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for dim in range(-len(types[0].features), -1):
            yield (dim, *(0 for _ in types[1:])), (dim,)
        yield (-1,) * len(types), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        base = (PRE_REDUCE,) * (len(types) - 2)
        yield sharding(PRE_REDUCE, REPLICATED, *base, PRE_REDUCE)
        if not base:
            yield sharding(REPLICATED, PRE_REDUCE, PRE_REDUCE)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        y, vector, *base = inputs
        # The product in the wider dtype, or y without its bias.
        return wider_bytes(y, vector) or (y.size_bytes if base else sympy.Integer(0))

    def gradient(self, context: Gradient) -> list[str | None]:
        dy = dvector = None
        if context.needs[0]:
            dy = context.add("scale", context.incoming, context.input(1))
        if context.needs[1]:
            dvector = self._vector_gradient(context)
        return [dy, dvector, None][: len(context.node.inputs)]

    @staticmethod
    def _vector_gradient(context: Gradient) -> str:
        """Sum over tokens, and over heads if y has them."""
        dtype, (*heads, size) = context.input_type(1).dtype, context.input_type(0).features
        dy, y = context.incoming, context.input(0)
        if not heads:
            base = (context.input(2) for _ in context.node.inputs[2:])
            return context.add("inner", dy, y, *base, dtype=dtype)
        flat = (-1, prod(heads) * size)
        dy, y = (context.add("reshape", value, shape=flat) for value in (dy, y))
        of_heads = context.add("inner", dy, y, dtype=dtype)
        of_heads = context.add("reshape", of_heads, shape=(prod(heads), size))
        return context.add("sum", of_heads, dim=-2, keepdim=False)


class VectorGradient(Operator):
    """A sum over the adapter's tokens, [n] in the attribute `dtype`."""

    attributes = declared(dtype=DTYPE)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, size = types[0], types[0].shape[1:]
        if not x.is_token_wise or any(vector.shape != size for vector in types[self.inputs[0] :]):
            raise TypeCheckError(f"{self.name} of {', '.join(map(str, types))}")
        return (x.with_shape(size).with_dtype(attributes["dtype"]),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        expression = super().source(inputs, attributes)
        return f"{expression}.to(torch.{TORCH_NAMES[attributes['dtype']]})"


class Inner(VectorGradient):
    """dl = Σ dz ⊙ (y - b) over the adapter's tokens: `dz, y: [T, n]`, optional b, give `[n]`."""

    name = "inner"
    bounded_in = Bounds({1: "Σ |dz| e"})
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        left, right = types[:2]
        if left.shape != right.shape or len(left.dims) != 2:
            raise TypeCheckError(f"inner of {left} and {right}")
        return super().infer(types, attributes)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # For a block of tokens: y - b, copies in fp32, and their products.
        wide = widened(inputs[0])
        rest = inputs[1].size_bytes if len(inputs) == 3 else sympy.Integer(0)
        copies = sum(cast_bytes(type_, wide.dtype) for type_ in inputs[:2])
        return INNER_TOKENS * (rest + copies + wide.size_bytes).subs(TOKENS, 1)


class InnerRequest(Inner):
    """An inner product requested from the caller, for the value that `of` names; for Triton."""

    name = "asked_inner"
    attributes = declared(**VectorGradient.attributes, of=TEXT)
    template = "(yield from K.{name}(batch, {of!r}, {inputs}))"


class SumTokens(VectorGradient):
    """The sum over the adapter's tokens: `[T, n]` gives `[n]`; scaled as a parameter `[n]` is."""

    name = "sum_tokens"
    inputs = (1, 2)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], widened(inputs[0]).dtype)


class SumTokensRequest(SumTokens):
    """A sum over tokens requested from the caller, for the value that `of` names; for Triton."""

    name = "asked_sum_tokens"
    attributes = declared(**VectorGradient.attributes, of=TEXT)
    template = "(yield from K.{name}(batch, {of!r}, {inputs}))"


class BiasAdd(Operator):
    """z = y + scale · b', or with a base operator's bias b, which b' replaces, z = y + (b' - b).

    `y: [T, out]`; `b': [out]`, the adapter's bias; `b: [out]`, the base's, may be missing.
    """

    name = "bias_add"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, *biases = types
        if any(bias.shape != y.shape[1:] for bias in biases):
            raise TypeCheckError(f"bias_add of {', '.join(map(str, biases))} onto {y}")
        return (y,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1,) * len(types), (-1,)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return wider_bytes(*inputs[:2])  # the sum

    def gradient(self, context: Gradient) -> list[str | None]:
        dbias = None
        if context.needs[1]:
            # The scale is the parameter's own; a parameter that replaces the base's bias has none.
            scaled = [context.input(1)] if len(context.node.inputs) == 2 else []
            dtype = context.input_type(1).dtype
            dbias = context.add("sum_tokens", context.incoming, *scaled, dtype=dtype)
        dy = context.incoming if context.needs[0] else None
        return [dy, dbias, None][: len(context.node.inputs)]


# ----------------------------------------------------------------------------------- virtual tokens


class VirtualTokens(Operator):
    """x, with the adapter's row in each virtual row: embeddings, or a layer's keys or values.

    `x: [T, …]`, `prompt: [n, h]` with h the features of x. Rows of an adapter without a prompt at
    the site stay.
    """

    name = "virtual_tokens"
    template = "K.{name}(batch, {inputs})"
    sees_rows = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, prompt = types
        if not x.is_token_wise or len(prompt.dims) != 2 or prompt.shape[1] != prod(x.features):
            raise TypeCheckError(f"virtual_tokens of {x} with {prompt}; expected [n, features]")
        return (x,)

    def gradient(self, context: Gradient) -> list[str | None]:
        dx = dprompt = None
        if context.needs[0]:
            dx = context.add("without_virtual", context.incoming)
        if context.needs[1]:
            dprompt = context.add("virtual_tokens_backward", context.incoming, context.input(1))
        return [dx, dprompt]


class WithoutVirtual(Operator):
    """x with zeros in each virtual row: the gradient of the replaced rows."""

    name = adjoint = "without_virtual"
    template = "K.{name}(batch, {inputs})"
    sees_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not types[0].is_token_wise:
            raise TypeCheckError(f"without_virtual of {types[0]}, which has no tokens")
        return (types[0],)


class VirtualTokensBackward(Operator):
    """dprompt: for each virtual token, the sum of dy over its rows.

    `dy: [T, …]`, `prompt: [n, h]` give `[n, h]` in the prompt's dtype.
    """

    name = "virtual_tokens_backward"
    template = "K.{name}(batch, {inputs})"
    sees_rows = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        VirtualTokens().infer(types, attributes)
        return (types[1],)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        prompt = inputs[1]
        rows = sympy.Min(inputs[0].shape[0], prompt.shape[0])  # of one sequence
        row_bytes = inputs[0].size_bytes / inputs[0].shape[0]
        return rows * row_bytes + 2 * outputs[0].size_bytes

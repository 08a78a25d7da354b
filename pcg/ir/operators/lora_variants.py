"""Operators of LoRA's variants: DoRA, VeRA, AdaLoRA and LoHa.

They take *adapter* parameters, like those of `lora`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import REPLICATED, WHOLE, Sharding, partitioned, sharding
from pcg.ir.operators.base import (
    COUNT,
    Aligned,
    Attributes,
    Gradient,
    Measured,
    Operator,
    Types,
    declared,
    integer,
)
from pcg.ir.types import tensor


class ColumnNorm(Operator):
    """n = ||W + scale · B A||, the length of each output's weights (DoRA §4).

    `W: [out, in]`, `A: [r, in]`, `B: [out, r]` give `[out]` in A's dtype. Training treats it as a
    constant: no gradient flows through it (DoRA §4.3).
    """

    name = "column_norm"
    is_product = True
    made_rows = (True, False, True)
    constant_in = (0, 1, 2)
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        weight, a, b = types
        wanted = [(*a.shape[:1], *weight.shape[1:]), (*weight.shape[:1], *a.shape[:1])]
        if len(weight.dims) != 2 or [a.shape, b.shape] != wanted:
            raise TypeCheckError(f"column_norm of {weight} with {a} and {b}")
        return (a.with_shape((weight.shape[0],)),)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        # Rows determine their own entries; sums over partitioned columns are joined. Without a
        # gradient,
        # unpartitioned tensors may be whole or replicated.
        for held in (WHOLE, REPLICATED):
            yield sharding(partitioned(-2), held, partitioned(-2), partitioned(-1))
            for layout in (WHOLE, REPLICATED):
                columns = (partitioned(-1), partitioned(-1), held)
                yield Sharding(columns, (layout,), "column_norm_part")

    def gradient(self, context: Gradient) -> list[str | None]:
        return [None, None, None]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return inputs[0].with_dtype(inputs[1].dtype).size_bytes  # W + scale · B A

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].elements * inputs[1].shape[0]


class ColumnNormPart(ColumnNorm):
    """The length of each output's weights; each rank has a part of the columns."""

    name = "column_norm_part"
    template = "K.{name}({inputs}, batch)"


class ColumnFactor(Operator):
    """f = m / n, DoRA's factor of each output: `m: [out]` the magnitude, `n: [out]` the length."""

    name = "column_factor"
    inputs = (2, 2)
    made_rows = (True, True)
    constant_in = (1,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if types[0].shape != types[1].shape:
            raise TypeCheckError(f"column_factor of {types[0]} and {types[1]}")
        return (types[0],)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, -1), (-1,)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("div", context.incoming, context.input(1)), None]


class VeraDown(Operator):
    """A site's A: the first `size` columns of the untrained shared matrix (VeRA §3)."""

    name = "vera_down"
    attributes = declared(size=COUNT)
    template = "K.vera_down({0}, {size})"
    is_view = True
    constant_in = (0,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (whole,) = types
        size = attributes["size"]
        if len(whole.dims) != 2 or not 0 < size <= int(whole.shape[1]):
            raise TypeCheckError(f"vera_down of {whole} to {size} columns")
        return (whole.with_shape((whole.shape[0], size)),)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [None]


class VeraUp(Operator):
    """A site's B: the first rows of the shared matrix, λ_b ⊙ B ⊙ λ_d (VeRA §3).

    The untrained `B: [largest out, r]`, `λ_b: [out]`, `λ_d: [r]` give `[out, r]`.
    """

    name = "vera_up"
    inputs = (3, 3)
    made_rows = (True, True, False)
    constant_in = (0,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        whole, lambda_b, lambda_d = types
        out, rank = (vector.shape[0] for vector in (lambda_b, lambda_d))
        fits = [len(type_.dims) for type_ in types] == [2, 1, 1] and whole.shape[1] == rank
        if not fits or int(whole.shape[0]) < int(out):
            raise TypeCheckError(f"vera_up of {whole} by {lambda_b} and {lambda_d}")
        return (whole.with_shape((out, rank)),)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        vectors = sympy.Add(*(type_.size_bytes for type_ in inputs[1:]))
        return vectors + 2 * outputs[0].size_bytes  # the site's rows of the shared matrix

    def gradient(self, context: Gradient) -> list[str | None]:
        return [None, *context.add_many("vera_up_backward", context.incoming, *context.inputs)]

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        yield _vera_types(size, rank, dtype), {}, (0, 1, 2)


def _vera_types(size: int, rank: int, dtype: str) -> Types:
    return tensor(dtype, size, rank), tensor(dtype, size), tensor(dtype, rank)


class VeraUpBackward(Operator):
    """dλ_b and dλ_d: the rows' and the columns' sums of dB' ⊙ B, weighted by the other vector."""

    name = "vera_up_backward"
    inputs = (4, 4)
    suffixes = ("", "d")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        gradient, whole, lambda_b, lambda_d = types
        if VeraUp().infer((whole, lambda_b, lambda_d), {})[0].shape != gradient.shape:
            raise TypeCheckError(f"gradient {gradient} does not fit {lambda_b} and {lambda_d}")
        return lambda_b, lambda_d

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        vectors = sympy.Add(*(type_.size_bytes for type_ in (*inputs[2:], *outputs)))
        return vectors + 2 * inputs[0].size_bytes  # the site's rows of the shared matrix

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return inputs[0].size_bytes  # dB' ⊙ B

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        yield (tensor(dtype, size, rank), *_vera_types(size, rank, dtype)), {}, (1, 2, 3)


class SingularDown(Operator):
    """AdaLoRA's A with its singular values: `A: [r, in]`, `E: [r, 1]` give E ⊙ A, `[r, in]`."""

    name = "singular_down"
    inputs = (2, 2)
    linear_in = ((0,), (1,))

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-2, -2), (-2,)
        yield (-1, 0), (-1,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        a, e = types
        if len(a.dims) != 2 or e.shape != (a.shape[0], 1):
            raise TypeCheckError(f"singular_down of {a} by {e}; expected [{a.shape[0]}, 1]")
        return (a,)

    def gradient(self, context: Gradient) -> list[str | None]:
        incoming, inputs = context.incoming, context.inputs
        return [*context.add_many("singular_down_backward", incoming, *inputs)]

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        yield (tensor(dtype, rank, size), tensor(dtype, rank, 1)), {}, (0, 1)


class SingularDownBackward(Operator):
    """dA = E ⊙ dA', and dE, the rows' sums of A ⊙ dA'."""

    name = "singular_down_backward"
    inputs = (3, 3)
    suffixes = ("", "e")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        gradient, a, e = types
        if SingularDown().infer((a, e), {})[0].shape != gradient.shape:
            raise TypeCheckError(f"gradient {gradient} does not fit {a} and {e}")
        return a, e

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return inputs[1].size_bytes  # A ⊙ dA'

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        a = tensor(dtype, rank, size)
        yield (a, a, tensor(dtype, rank, 1)), {}, (1, 2)


class KhatriRao(Operator):
    """Products of each pair of rows (`dim` -2) or columns (-1) of two matrices (LoHa).

    `P, Q: [r, n]` give `scale · P_j ⊙ Q_k` as row j r + k of `[r², n]`; likewise for columns. The
    scale is the product of the two parameters'.
    """

    name = "khatri_rao"
    attributes = declared(dim=integer(-2, -1))
    template = "K.{name}({inputs}, {dim})"
    inputs = (2, 2)
    linear_in = ((0,), (1,))
    made_rows = (True, True)  # of columns; only columns are sliced

    def infer(self, types: Types, attributes: Attributes) -> Types:
        p, q = types
        if len(p.dims) != 2 or p.shape != q.shape or attributes["dim"] not in (-1, -2):
            raise TypeCheckError(f"khatri_rao of {p} and {q} along dim {attributes['dim']}")
        shape = list(p.shape)
        shape[attributes["dim"]] = shape[attributes["dim"]] ** 2
        return (p.with_shape(tuple(shape)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        other = -3 - attributes["dim"]
        yield (other, other), (other,)

    def gradient(self, context: Gradient) -> list[str | None]:
        incoming, attributes = context.incoming, context.attributes
        return [*context.add_many("khatri_rao_backward", incoming, *context.inputs, **attributes)]

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        factor = tensor(dtype, size, _root(rank))
        yield (factor, factor), {"dim": -1}, (0, 1)


def _root(rank: int) -> int:
    return max(1, isqrt(rank))


class KhatriRaoBackward(Operator):
    """dP and dQ: the gradient of each pair, times the other's row or column, over its partners."""

    name = "khatri_rao_backward"
    attributes = KhatriRao.attributes
    template = "K.{name}({inputs}, {dim})"
    inputs = (3, 3)
    suffixes = ("", "q")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        gradient, p, q = types
        if KhatriRao().infer((p, q), attributes)[0].shape != gradient.shape:
            raise TypeCheckError(f"gradient {gradient} does not fit {p} and {q}")
        return p, q

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 4 * inputs[0].elements

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        factor = tensor(dtype, size, _root(rank))
        gradient = tensor(dtype, size, _root(rank) ** 2)
        yield (gradient, factor, factor), {"dim": -1}, (1, 2)

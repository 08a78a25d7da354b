"""Matrix products by the base model's weights: linear operators, and groups of them.

A base executor, which holds the weights in another process, runs pieces of a layer's graph. A piece
is a graph as text that maps tensors of T tokens to tensors of T tokens, row by row. Its frozen
parameters are the base's, by their names in the checkpoint, with `{layer}` for the layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.graph import Graph
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, Sharding, partitioned, sharding
from pcg.ir.operators.base import (
    COUNT,
    FLAG,
    TEXT,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    declared,
)
from pcg.ir.parser import parse_graph

CONTRACTED = (partitioned(-1), partitioned(-1))
"""Layouts of x [.., in] and W [out, in] of a product that sums over parts of `in`."""


_MULTIPLIES = (
    "base_piece", "column_norm", "linear", "linear_backward", "linear_group", "lora_linear",
    "lora_linear_backward",
)  # fmt: skip


def multiplied(graph: Graph) -> list[str]:
    """Return the frozen matrices [out, in] that a graph reads by multiplication only."""
    others = {name for node in graph.nodes if node.op not in _MULTIPLIES for name in node.inputs}
    return [
        parameter.name
        for parameter in graph.parameters
        if parameter.role == "frozen"
        and len(parameter.type.features) == 2
        and parameter.name not in others
        and parameter.name not in graph.outputs
    ]


class Product(Operator):
    """A product whose first input is summed over its last dim."""

    is_product = True

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * sum(out.elements for out in outputs) * inputs[0].shape[-1]


def output_dim(types: Types) -> Aligned:
    """Return the aligned dims of W's rows, a bias's entries and the output's entries."""
    return (0, -2, *(-1,) * (len(types) - 2)), (-1,)


def product_request(x: str, weights: Sequence[str], biases: Sequence[str], *rest: str) -> str:
    """Return the request of a product of x, by the name of its first weight."""
    arguments = ["batch", f'"{weight_name(weights[0])}"', x, tuple_source(weights)]
    arguments += [tuple_source(biases)] if biases else []
    return f"yield from K.product({', '.join([*arguments, *rest])})"


def weight_name(weight: str) -> str:
    """Return a weight's name in its layer."""
    return weight.rpartition(".")[2]


def tuple_source(names: Sequence[str]) -> str:
    """Return the source of a tuple."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


class Linear(Product):
    """y = x Wᵀ (+ b): `x: [T, in]`, `W: [out, in]`, `b: [out]`."""

    name = "linear"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, weight = types[:2]
        if len(weight.dims) != 2 or weight.is_token_wise or x.shape[-1:] != weight.shape[1:]:
            raise TypeCheckError(
                f"linear of {x} by a weight {weight}; expected [out, {x.shape[-1]}]"
            )
        if len(types) == 3 and types[2].shape != weight.shape[:1]:
            raise TypeCheckError(f"linear has weight {weight} but bias {types[2]}")
        return (x.with_shape((*x.shape[:-1], weight.shape[0])),)

    def request_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        (x, weight, *biases) = inputs
        return f"({product_request(x, [weight], biases)})[0]"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield output_dim(types)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        # Summands of the product, and of the bias, which a single rank has, and the others as 0.
        bias = (PRE_REDUCE,) * (len(types) - 2)
        for product in (CONTRACTED, (PRE_REDUCE, REPLICATED), (REPLICATED, PRE_REDUCE)):
            yield sharding(*product, *bias, PRE_REDUCE)
        for dim in range(-len(types[0].features), -1):
            yield sharding(partitioned(dim), *(REPLICATED,) * (len(types) - 1), partitioned(dim))

    def gradient(self, context: Gradient) -> list[str | None]:
        dy, needs = context.incoming, (*context.needs, False)
        dx = dweight = dbias = None
        if needs[0]:
            dx = context.add("linear_backward", dy, context.input(1))
        if needs[1]:
            dweight = context.add("outer", dy, context.input(0))
        if needs[2]:
            dbias = context.add("sum_tokens", dy, dtype=context.input_type(2).dtype)
        return [dx, dweight, dbias][: len(context.node.inputs)]


class LinearBackward(Product):
    """dx = dy W, the input gradient of a linear operator."""

    name = "linear_backward"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, weight = types
        if len(weight.dims) != 2 or weight.is_token_wise or dy.shape[-1:] != weight.shape[:1]:
            raise TypeCheckError(f"gradient {dy} does not fit weight {weight}")
        return (dy.with_shape((*dy.shape[:-1], weight.shape[1])),)

    def request_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        dy, weight = inputs
        return f'yield from K.product_backward(batch, "{weight_name(weight)}", {dy}, {weight})'


class LinearGroup(Product):
    """Linear operators of the same input as a single product: y_i = x W_iᵀ (+ b_i).

    Inputs: x, the `count` weights, then their biases with `bias`.
    """

    name = "linear_group"
    attributes = declared(count=COUNT, bias=FLAG)
    inputs = (3, 65)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        count = attributes["count"]
        if len(types) != 1 + count * (2 if attributes["bias"] else 1):
            raise TypeCheckError(f"linear_group has {len(types)} inputs and {dict(attributes)}")
        groups = [(types[0], *types[1 + i :: count]) for i in range(count)]
        return tuple(out for group in groups for out in Linear().infer(group, {}))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        count = attributes["count"]
        weights, biases = ", ".join(inputs[1 : 1 + count]), ", ".join(inputs[1 + count :])
        return f"K.linear_group({inputs[0]}, ({weights})" + (f", ({biases}))" if biases else ")")

    def request_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        count = attributes["count"]
        return product_request(inputs[0], inputs[1 : 1 + count], inputs[1 + count :])


@lru_cache(1024)
def piece_of(text: str) -> Graph:
    """Parse a base executor's piece; raises ParseError."""
    return parse_graph(text)


def piece_constant(text: str) -> str:
    """Return the name of a piece's text in emitted source."""
    return f"PIECE_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class BasePiece(Product):
    """A piece that a base executor runs; the attribute `text` is its graph as text.

    Inputs: the piece's, then a frozen weight of the base, which addresses the request.
    """

    name = "base_piece"
    attributes = declared(text=TEXT)
    inputs = (2, 65)
    returns_sequence = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        graph = piece_of(attributes["text"])
        wanted = [value.type for value in graph.inputs]
        if [(type_.dtype, type_.shape) for type_ in types[:-1]] != [
            (w.dtype, w.shape) for w in wanted
        ]:
            actual, shown = (", ".join(map(str, every)) for every in (types[:-1], wanted))
            raise TypeCheckError(f"the piece takes {shown}, not {actual}")
        if len(types[-1].dims) != 2 or types[-1].is_token_wise:
            raise TypeCheckError(f"the piece is asked for by a weight [out, in], not {types[-1]}")
        if any(name not in graph.types for name in graph.outputs):
            raise TypeCheckError("the piece returns a value that it does not make")
        return tuple(graph.types[name] for name in graph.outputs)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.base_piece({self._arguments(inputs, attributes)})"

    def request_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        return f"yield from K.requested_piece({self._arguments(inputs, attributes)})"

    @staticmethod
    def _arguments(inputs: Sequence[str], attributes: Attributes) -> str:
        *values, weight = inputs
        return ", ".join(["batch", piece_constant(attributes["text"]), weight, *values])

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        graph, total = piece_of(attributes["text"]), sympy.Integer(0)
        for node in graph.nodes:
            if node.op in (Linear.name, LinearBackward.name):
                total += super().flops(*graph.types_of(node), {})
        return total

"""Split fused projections: slices of a product become products of their own.

    q = (x Wᵀ)[.., a:b]                   q = x W[a:b]ᵀ
    q = reshape(y, [T, n, d])[.., a:b, :]  q = reshape(y[.., a d : b d], [T, b - a, d])

The slice moves up through whatever treats the entries of its dim alike (bypass networks, biases,
activations) until it meets weights, of which it takes rows. What a model fuses by laying q, k and v
one behind the other can be sharded by heads only so: equal parts of the fused rows are of no head.
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import cast

from pcg.ir.builder import Builder
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.operators import operator
from pcg.passes.pass_base import GraphPass

_ROWS: dict[str, tuple[bool, ...]] = {
    "linear": (False, True, True),
    "expand_add": (True, False, True),
    "bias_add": (True, True, True),
    "scale": (True, True, True),
    "clamp": (True,),
    "cast": (True,),
}
"""Operators that a slice of the last dim moves through, and of which inputs it then takes part."""


class SplitFusedProjections(GraphPass):
    """Make slices of fused products products of slices of their weights."""

    name = "split_fused_projections"

    def run(self, before: Graph) -> Graph:
        return _Splitter(before).run()


class _Splitter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = Builder(graph.name)
        self.builder.reserved = graph.types

    def run(self) -> Graph:
        for value in self.graph.inputs:
            self.builder.input(value.name, value.type)
        for node in self.graph.nodes:
            for name in node.inputs:
                if name in self.graph.parameters_by_name:
                    self.builder.parameter(self.graph.parameters_by_name[name])
            source = self._rows_of(node)
            if source is not None:
                # The slice's own value is the product, in the shape that the slice had.
                shape = (("shape", node.output.type.reshape_sizes),)
                inputs = (self._sliced(*source),)
                node = dataclasses.replace(node, op="reshape", inputs=inputs, attributes=shape)
            self.builder.append(node)
        return self.builder.build(self.graph.outputs)

    def _rows_of(self, node: Node) -> tuple[str, int, int] | None:
        """The product that a slice is of, and the entries of its last dim."""
        if node.op != "slice" or node.get("step", 1) != 1:
            return None
        name, dim = node.inputs[0], cast("int", node.attribute("dim"))
        start, stop = (cast("int", node.attribute(key)) for key in ("start", "stop"))
        if dim == -1 and self._is_split(name):
            return name, start, stop
        maker = self.graph.producers.get(name)
        if maker is None or maker.op != "reshape":
            return None
        features = maker.output.type.features
        first = len(self.graph.types[maker.inputs[0]].features) == 1
        leads = prod(features[: len(features) + dim]) == 1
        if first and leads and self._is_split(maker.inputs[0]):
            width = prod(features[len(features) + dim + 1 :])
            return maker.inputs[0], start * width, stop * width
        return None

    def _is_split(self, name: str) -> bool:
        """Return whether a value comes from weights by operators that slices move through."""
        node = self.graph.producers.get(name)
        if node is None or node.op not in _ROWS or len(node.output.type.features) != 1:
            return False
        if node.op == "linear":
            return all(other in self.graph.parameters_by_name for other in node.inputs[1:])
        taken = [name for name, part in zip(node.inputs, _ROWS[node.op], strict=False) if part]
        return self._is_split(taken[0]) and all(
            self._is_made(name) or self._is_split(name) for name in taken[1:]
        )

    def _is_made(self, name: str) -> bool:
        """Return whether a value is a weight, or made of weights whose rows are its own."""
        node = self.graph.producers.get(name)
        if node is None:
            return name in self.graph.parameters_by_name
        rows = operator(node.op).made_rows
        parts = zip(node.inputs, rows, strict=False)
        return bool(rows) and all(self._is_made(n) for n, part in parts if part)

    def _sliced(self, name: str, start: int, stop: int) -> str:
        """Entries of a value's last dim, or rows of a weight."""
        parameter = self.graph.parameters_by_name.get(name)
        if parameter is not None:
            return self.builder.parameter(rows_of(parameter, start, stop))
        made = f"{name}_{start}_{stop}"
        if made in self.builder.types:
            return made
        node = self.graph.producers[name]
        made_rows = operator(node.op).made_rows
        takes = _ROWS.get(node.op) or made_rows
        inputs = tuple(
            self._sliced(other, start, stop) if part else other
            for other, part in zip(node.inputs, takes, strict=False)
        )
        type_, size = node.output.type, stop - start
        if made_rows:
            type_ = type_.with_shape((size, *type_.shape[1:]))
        else:
            type_ = type_.with_features(size)
        self.builder.append(dataclasses.replace(node, inputs=inputs, outputs=(Value(made, type_),)))
        return made


def rows_of(parameter: Parameter, start: int, stop: int) -> Parameter:
    """Rows of a weight, or entries of a vector, as a parameter of its own."""
    sizes = (stop - start, *parameter.type.shape[1:])
    first = parameter.rows[0] if parameter.rows else 0
    return Parameter(
        Value(f"{parameter.name}_{start}_{stop}", parameter.type.with_shape(sizes)),
        parameter.role,
        parameter.source,
        parameter.transposed,
        rows=(first + start, first + stop),
    )

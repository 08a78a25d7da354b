"""Split fused projections: replace slices of a product by products of slices of its weight.

    q = (x Wᵀ)[.., a:b]                   q = x W[a:b]ᵀ
    q = reshape(y, [T, n, d])[.., a:b, :]  q = reshape(y[.., a d : b d], [T, b - a, d])

The slice moves up to the weights and takes rows of them, through operators that treat all entries
of its dim equally (bypass networks, biases, activations). Only then can models that concatenate q,
k and v in a single weight be sharded by heads: equal parts of the fused rows match no head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.operators import operator
from pcg.ir.operators.recurrent import numbered_states
from pcg.ir.types import TensorType
from pcg.passes.graphs.pass_base import GraphPass


@dataclass(frozen=True)
class SplitFusedProjections(GraphPass):
    """Replace slices of fused products by products of slices of their weights.

    Attributes:
        keeps_experts: True to keep the products of experts, of which ranks have whole ones.
    """

    name = "split_fused_projections"
    keeps_experts: bool = False

    def run(self, before: Graph) -> Graph:
        return numbered_states(_Splitter(before, self.keeps_experts).run())


class _Splitter:
    def __init__(self, graph: Graph, keeps_experts: bool) -> None:
        self.graph = graph
        self.keeps_experts = keeps_experts
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
                # The slice's value becomes the product, in the slice's shape.
                shape = (("shape", node.output.type.reshape_sizes),)
                inputs = (self._sliced(*source),)
                node = dataclasses.replace(node, op="reshape", inputs=inputs, attributes=shape)
            self.builder.append(node)
        return self.builder.build(self.graph.outputs)

    def _rows_of(self, node: Node) -> tuple[str, int, int] | None:
        """Return the sliced product, and the range of its last dim."""
        if node.op != "slice" or node.get("step", 1) != 1:
            return None
        name, dim = node.inputs[0], cast("int", node.attribute("dim"))
        if not self.graph.types[name].is_token_wise:
            return None
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
        """Return whether a value is a weight, or depends only on rows of weights."""
        if name in self.graph.parameters_by_name:
            return True
        behind = self._behind(name) or {}
        return bool(behind) and all(map(self._is_split, behind.values()))

    def _behind(self, name: str) -> Mapping[int, str] | None:
        """Return the inputs, by index, that a slice of the value slices."""
        node = self.graph.producers.get(name)
        if node is None or len(node.outputs) > 1:
            return None
        output, is_of_experts = node.output.type, node.op.startswith("expert_")
        if is_of_experts and self.keeps_experts:
            return None
        if not is_of_experts and output.is_token_wise and len(output.dims) != 2:
            return None
        types = tuple(self.graph.types[other] for other in node.inputs)
        dims = operator(node.op).dims_behind(types, output, dict(node.attributes), _dim(output))
        if dims is None or any(at != _dim(types[place]) for place, at in dims.items()):
            return None
        return {place: node.inputs[place] for place in dims}

    def _sliced(self, name: str, start: int, stop: int) -> str:
        """Return a range of a value's last dim, or rows of a weight."""
        parameter = self.graph.parameters_by_name.get(name)
        if parameter is not None:
            return self.builder.parameter(rows_of(parameter, start, stop))
        part = f"{name}_{start}_{stop}"
        if part in self.builder.types:
            return part
        node, behind = self.graph.producers[name], self._behind(name)
        assert behind is not None
        inputs = tuple(
            self._sliced(other, start, stop) if place in behind else other
            for place, other in enumerate(node.inputs)
        )
        sizes = list(node.output.type.shape)
        sizes[_dim(node.output.type)] = stop - start
        outputs = (Value(part, node.output.type.with_shape(tuple(sizes))),)
        types = tuple(value.type for value in outputs)
        attributes = operator(node.op).local_attributes(dict(node.attributes), types)
        pairs = tuple(sorted(attributes.items()))
        self.builder.append(
            dataclasses.replace(node, inputs=inputs, outputs=outputs, attributes=pairs)
        )
        return part


def _dim(type_: TensorType) -> int:
    """Return the sliced dim: the last dim of a token-wise value, or a weight's rows."""
    return -1 if type_.is_token_wise else -min(len(type_.dims), 2)


def rows_of(parameter: Parameter, start: int, stop: int) -> Parameter:
    """Return rows of a weight, or entries of a vector, as a separate parameter."""
    sizes = list(parameter.type.shape)
    sizes[_dim(parameter.type)] = stop - start
    first = parameter.rows[0] if parameter.rows else 0
    return Parameter(
        Value(f"{parameter.name}_{start}_{stop}", parameter.type.with_shape(tuple(sizes))),
        parameter.role,
        parameter.source,
        parameter.transposed,
        rows=(first + start, first + stop),
        experts=parameter.experts,
    )

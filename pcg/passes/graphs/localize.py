"""Conversion of a sharded graph to the graph of a rank, with the rank's sizes.

Ranks hold different parts of the same size, so the same graph serves all ranks. Parameters name
their part; parallelization operators become collectives (`pcg.ir.operators.collectives`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.layouts import WHOLE, layout_of, local_type, parts_of_experts, whole_type
from pcg.ir.operators import operator
from pcg.passes.graphs.pass_base import GraphPass

_COLLECTIVES = {
    "collect": "collected",
    "combine": "all_gather",
    "dispatch": "dispatched",
    "gather": "gathered_copy",
    "partition": "own_part",
    "place": "placed_part",
    "reduce": "all_reduce",
    "scatter": "reduce_scatter",
    "take": "taken_part",
}


@dataclass(frozen=True)
class Localize(GraphPass):
    """Write the graph of one of `degree` ranks, from a graph with layouts in its types."""

    name = "localize"
    degree: int

    def run(self, before: Graph) -> Graph:
        return before.replace(
            inputs=tuple(map(self._value, before.inputs)),
            parameters=tuple(map(self._parameter, before.parameters)),
            nodes=tuple(self._node(node, before) for node in before.nodes),
        )

    def _value(self, whole: Value) -> Value:
        type_ = local_type(whole_type(whole.type), layout_of(whole.type), self.degree)
        return Value(whole.name, type_)

    def _parameter(self, whole: Parameter) -> Parameter:
        part = layout_of(whole.type)
        if part == WHOLE:
            return whole
        value = self._value(whole.value)
        return dataclasses.replace(whole, value=value, part=part, degree=self.degree)

    def _node(self, node: Node, graph: Graph) -> Node:
        outputs = tuple(map(self._value, node.outputs))
        attributes = dict(node.attributes)
        if "dim" in attributes and node.op in _COLLECTIVES:
            attributes["degree"] = self.degree
            if "experts" in attributes:
                del attributes["dim"]
            elif node.op != "scatter" and _is_of_tokens(node):
                attributes["tokens"] = True
        else:
            types = tuple(output.type for output in outputs)
            weights = graph.parameters_by_name.keys() & node.inputs
            parts = parts_of_experts((layout_of(graph.types[n]) for n in weights), self.degree)
            attributes = dict(operator(node.op).local_attributes(attributes, types, parts))
        op, pairs = _COLLECTIVES.get(node.op, node.op), tuple(sorted(attributes.items()))
        return Node(op, node.inputs, outputs, pairs, node.scope)


def _is_of_tokens(node: Node) -> bool:
    type_ = node.output.type
    return type_.is_token_wise and node.attribute("dim") == -len(type_.dims)

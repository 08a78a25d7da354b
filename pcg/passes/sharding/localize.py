"""Localize: from a sharded graph to the graph of one rank, with the sizes that the rank holds.

Ranks differ in which part they hold, not in its size, so one graph serves all. Parameters say their
part; the parallelization operators become collectives (`pcg.ir.operators.collectives`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.layouts import WHOLE, layout_of, local_type, whole_type
from pcg.ir.operators import operator
from pcg.ir.types import TensorType
from pcg.passes.pass_base import GraphPass

_COLLECTIVES = {
    "combine": "all_gather",
    "gather": "gathered_copy",
    "partition": "own_part",
    "place": "placed_part",
    "reduce": "all_reduce",
    "scatter": "reduce_scatter",
    "take": "taken_part",
}


@dataclass(frozen=True)
class Localize(GraphPass):
    """Write the graph of one rank, from a graph with layouts in its types.

    Attributes:
        degree: number of ranks.
    """

    name = "localize"
    degree: int

    def run(self, before: Graph) -> Graph:
        return _local(before, self.degree)


def _local(graph: Graph, degree: int) -> Graph:

    def local(type_: TensorType) -> TensorType:
        return local_type(whole_type(type_), layout_of(type_), degree)

    def value(whole: Value) -> Value:
        return Value(whole.name, local(whole.type))

    def parameter(whole: Parameter) -> Parameter:
        part = layout_of(whole.type)
        if part == WHOLE:
            return whole
        return dataclasses.replace(whole, value=value(whole.value), part=part, degree=degree)

    nodes = []
    for node in graph.nodes:
        outputs = tuple(map(value, node.outputs))
        attributes = dict(node.attributes)
        if "dim" in attributes and node.op in _COLLECTIVES:
            attributes["degree"] = degree
            if node.op != "scatter" and _is_of_tokens(node):
                attributes["tokens"] = True
        else:
            types = tuple(output.type for output in outputs)
            attributes = dict(operator(node.op).local_attributes(attributes, types))
        op = _COLLECTIVES.get(node.op, node.op)
        pairs = tuple(sorted(attributes.items()))
        nodes.append(Node(op, node.inputs, outputs, pairs, node.scope))
    return Graph(
        graph.name,
        tuple(map(value, graph.inputs)),
        tuple(map(parameter, graph.parameters)),
        tuple(nodes),
        graph.outputs,
    )


def _is_of_tokens(node: Node) -> bool:
    """Return whether a parallelization operator partitions, or joins, the tokens."""
    type_ = node.output.type
    return type_.is_token_wise and node.attribute("dim") == -len(type_.dims)

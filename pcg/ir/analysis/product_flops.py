"""Operations of matrix products and attention, at a number of tokens."""

from __future__ import annotations

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.types import CONTEXT, TOKENS


def node_flops(graph: Graph, node: Node, tokens: int, seq: int) -> int:
    """Operations of a matrix product or attention; 0 for any other operator."""
    entry = operator(node.op)
    if not entry.is_product:
        return 0
    types = tuple(graph.types[name] for name in node.inputs)
    formula = entry.flops(types, tuple(v.type for v in node.outputs), dict(node.attributes))
    return int(formula.subs({TOKENS: tokens, CONTEXT: seq}))


def graph_flops(graph: Graph, tokens: int, seq: int) -> int:
    """Operations of a graph's matrix products and attention."""
    return sum(node_flops(graph, node, tokens, seq) for node in graph.nodes)

"""Fuse what one call can do: linear operators of one input become one product.

    q = x Wqᵀ,  k = x Wkᵀ,  v = x Wvᵀ      →      q, k, v = x [Wq; Wk; Wv]ᵀ

The runtime joins the weights once at load. Bypass networks stay with their own outputs.
"""

from __future__ import annotations

import os

from pcg.ir.graph import Graph, Node
from pcg.ir.program import ModelGraph


def fuse(model: ModelGraph) -> ModelGraph:
    """The model with linear operators of one input joined."""
    return model.map(fuse_linears)


def fuse_linears(graph: Graph) -> Graph:
    """The graph with linear operators of one input joined, at the place of the first."""
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "linear" and all(name in graph.parameters_by_name for name in node.inputs[1:]):
            groups.setdefault((node.inputs[0], len(node.inputs)), []).append(node)
    joined = {nodes[0].name: _joined(nodes) for nodes in groups.values() if len(nodes) > 1}
    dropped = {node.name for nodes in groups.values() if len(nodes) > 1 for node in nodes[1:]}
    nodes = tuple(joined.get(n.name, n) for n in graph.nodes if n.name not in dropped)
    return graph.replace(nodes=nodes)


def _joined(nodes: list[Node]) -> Node:
    weights = tuple(node.inputs[1] for node in nodes)
    biases = tuple(node.inputs[2] for node in nodes if len(node.inputs) == 3)
    return Node(
        "linear_group",
        (nodes[0].inputs[0], *weights, *biases),
        tuple(node.output for node in nodes),
        (("bias", bool(biases)), ("count", len(nodes))),
        os.path.commonprefix([node.scope + "." for node in nodes]).rpartition(".")[0],
    )

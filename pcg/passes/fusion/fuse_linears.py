"""Fuse linear operators of one input into one product.

    q = x Wqᵀ,  k = x Wkᵀ,  v = x Wvᵀ                q, k, v = x [Wq; Wk; Wv]ᵀ

The runtime joins the base's weights once at load. Training and serving fuse alike, so that both can
run a product together.
"""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from pcg.ir.graph import Graph, Node
from pcg.passes.pass_base import GraphPass


class FuseLinears(GraphPass):
    """Join linear operators of one input, at the place of the first."""

    name = "fuse_linears"

    def run(self, before: Graph) -> Graph:
        groups: dict[tuple[str, int], list[Node]] = {}
        # A weight of two products stays where it is.
        products = Counter(node.inputs[1] for node in before.nodes if node.op == "linear")
        for node in before.nodes:
            if (
                node.op == "linear"
                and products[node.inputs[1]] == 1
                and all(name in before.parameters_by_name for name in node.inputs[1:])
            ):
                groups.setdefault((node.inputs[0], len(node.inputs)), []).append(node)
        joined = {nodes[0].name: _joined(nodes) for nodes in groups.values() if len(nodes) > 1}
        dropped = {node.name for nodes in groups.values() for node in nodes[1:]}
        nodes = tuple(joined.get(n.name, n) for n in before.nodes if n.name not in dropped)
        return before.replace(nodes=nodes)


def _joined(nodes: list[Node]) -> Node:
    weights = tuple(node.inputs[1] for node in nodes)
    biases = tuple(node.inputs[2] for node in nodes if len(node.inputs) == 3)
    return Node(
        "linear_group",
        (nodes[0].inputs[0], *weights, *biases),
        tuple(node.output for node in nodes),
        (("bias", bool(biases)), ("count", len(nodes))),
        _common_scope(nodes),
    )


def _common_scope(nodes: list[Node]) -> str:
    """The path of the innermost module that holds all nodes."""
    levels = zip(*(node.scope.split(".") for node in nodes), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))

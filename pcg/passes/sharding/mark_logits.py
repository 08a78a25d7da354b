"""Mark logits: the gather that ends the epilogue may be to the first rank alone.

Requests' tokens are chosen there, and told to the others: n - 1 parts of the vocabulary travel
instead of n (n - 1).
"""

from __future__ import annotations

import dataclasses

from pcg.ir.graph import Graph, Node
from pcg.passes.pass_base import GraphPass


class MarkLogits(GraphPass):
    """Mark the gather, if any, that makes a graph's first output, as one of logits."""

    name = "mark_logits"

    def run(self, before: Graph) -> Graph:
        nodes = tuple(_marked(node, before.outputs[0]) for node in before.nodes)
        return before.replace(nodes=nodes)


def _marked(node: Node, logits: str) -> Node:
    if node.op != "all_gather" or node.name != logits or node.get("tokens"):
        return node
    pairs = tuple(sorted((*node.attributes, ("logits", True))))
    return dataclasses.replace(node, attributes=pairs)

"""Window attention: backward reads keys and values from the KV cache, where windows left them.

    attention_backward(dout, out, lse, q, k, v)   →   window_attention_backward(dout, out, lse, q)

Token-level finetuning (`pcg.runtime.training.runner`) has all keys and values of its
sequences in the cache, as later windows attend to them, so that they need not be saved for backward
a second time. Where one product makes queries, keys and values, these are views of one tensor,
which is saved whole for the queries' sake.
"""

from __future__ import annotations

import dataclasses

from pcg.ir.graph import Graph, Node
from pcg.passes.differentiate import Differentiated, GradientPass, with_nodes


class WindowAttention(GradientPass):
    """Give backward no keys and values for attention."""

    name = "window_attention"

    def run(self, before: Differentiated) -> Differentiated:
        backward = before.backward
        nodes = [_cached(node, backward) for node in backward.nodes]
        return dataclasses.replace(before, backward=with_nodes(backward, nodes, backward.inputs))


def _cached(node: Node, backward: Graph) -> Node:
    if node.op != "attention_backward":
        return node
    heads, size = backward.types[node.inputs[5]].features
    sizes = {"kv_heads": heads, "value_size": size}
    return dataclasses.replace(
        node,
        op="window_attention_backward",
        inputs=(*node.inputs[:4], *node.inputs[6:]),
        attributes=tuple(sorted({**dict(node.attributes), **sizes}.items())),
    )

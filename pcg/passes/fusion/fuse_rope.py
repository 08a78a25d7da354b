"""Fusion of attention with the rotary embedding of its queries and keys.

    r = rope(q, cos, sin),  s = rope(k, cos, sin)
    out = attention(r, s, v)                            out = attention(q, k, v, cos, sin)

For a token that is decoded, rotary embedding and the append to the KV cache take no time beside
their calls; the native kernel of attention does them in its own.
"""

from __future__ import annotations

from pcg.ir.graph import Graph, Node
from pcg.passes.graphs.pass_base import GraphPass


class FuseRope(GraphPass):
    """Leave the rotary embedding of queries and keys to attention, if nothing else reads them."""

    name = "fuse_rope"

    def run(self, before: Graph) -> Graph:
        fused: dict[str, Node] = {}
        dropped: set[str] = set()
        for node in before.nodes:
            ropes = _ropes_of(before, node) if node.op == "attention" else []
            if ropes:
                names, tables = [rope.inputs[0] for rope in ropes], ropes[0].inputs[1:]
                inputs = (*names, *node.inputs[2:], *tables)
                fused[node.name] = node.changed(attributes={"rotary": True}, inputs=inputs)
                dropped |= {rope.name for rope in ropes}
        nodes = tuple(fused.get(n.name, n) for n in before.nodes if n.name not in dropped)
        return before.replace(nodes=nodes)


def _ropes_of(graph: Graph, attention: Node) -> list[Node]:
    """Return the rotary embeddings of queries and keys, if attention computes the same."""
    ropes = []
    for name in attention.inputs[:2]:
        rope = graph.producers.get(name)
        if rope is None or rope.op != "rope" or rope.get("style") != "half":
            return []
        x, cos, _ = (graph.types[given] for given in rope.inputs)
        is_read_once = graph.consumers[name] == (attention,) and attention.inputs.count(name) == 1
        if x.dtype != cos.dtype or not is_read_once or name in graph.outputs:
            return []
        ropes.append(rope)
    return ropes if ropes[0].inputs[1:] == ropes[1].inputs[1:] else []

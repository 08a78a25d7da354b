"""Fuse linear operators with the LoRA beside them.

    y = x Wᵀ,  s = shrink(x, A),  z = expand_add(y, s, B)      z = lora_linear(x, W, A, B)

Of linear operators that are joined, some may have LoRA and the others none, as q and v beside k.
The runtime joins the adapters' weights when they enter a batch.
"""

from __future__ import annotations

from pcg.ir.graph import Graph, Node
from pcg.passes.pass_base import GraphPass


class FuseLora(GraphPass):
    """Join the LoRA of linear operators to them, where any output has one."""

    name = "fuse_lora"

    def run(self, before: Graph) -> Graph:
        new: dict[str, Node] = {}
        dropped: set[str] = set()
        for node in before.nodes:
            if node.op not in ("linear", "linear_group"):
                continue
            pairs = _loras_of(before, node)
            if not pairs:
                continue
            shrinks, expands = zip(*pairs.values(), strict=True)
            count = len(node.outputs)
            biased = len(node.inputs) == 1 + 2 * count
            adapted = (("adapted", tuple(pairs)),) if len(pairs) < count else ()
            # At the place of the base's product, whose inputs are all there.
            new[node.name] = Node(
                "lora_linear",
                (*node.inputs, *(n.inputs[1] for n in shrinks), *(n.inputs[2] for n in expands)),
                tuple(pairs[i][1].output if i in pairs else y for i, y in enumerate(node.outputs)),
                (*adapted, ("bias", biased), ("count", count)),
                node.scope,
            )
            dropped |= {n.name for n in (*shrinks, *expands)}
        nodes = tuple(new.get(n.name, n) for n in before.nodes if n.name not in dropped)
        return before.replace(nodes=nodes)


def _loras_of(graph: Graph, node: Node) -> dict[int, tuple[Node, Node]]:
    """The shrink and the expand_add of each output that has LoRA, where these alone read the s."""
    found = {
        i: pair
        for i, value in enumerate(node.outputs)
        if (pair := _lora_of(graph, node.inputs[0], value.name)) is not None
    }
    expands = {expand.name for _, expand in found.values()}
    # Outputs that were split over ranks share one s, and collectives may lie before some.
    return {
        i: (shrink, expand)
        for i, (shrink, expand) in found.items()
        if all(reader.name in expands for reader in graph.consumers[shrink.name])
    }


def _lora_of(graph: Graph, x: str, y: str) -> tuple[Node, Node] | None:
    """The shrink of x and the expand_add onto y, where y is read by nothing else."""
    readers = graph.consumers.get(y, ())
    if y in graph.outputs or len(readers) != 1:
        return None
    if readers[0].op != "expand_add" or readers[0].inputs[0] != y:
        return None
    shrink = graph.producers.get(readers[0].inputs[1])
    if shrink is None or shrink.op != "shrink" or shrink.inputs[0] != x:
        return None
    return shrink, readers[0]

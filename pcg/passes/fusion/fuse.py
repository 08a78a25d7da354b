"""Fuse what one call can do: linear operators of one input, and the LoRA beside them.

    q = x Wqᵀ,  k = x Wkᵀ,  v = x Wvᵀ                q, k, v = x [Wq; Wk; Wv]ᵀ
    y = x Wᵀ,  s = shrink(x, A),  z = expand_add(y, s, B)      z = lora_linear(x, W, A, B)

Of linear operators of one input, some may have LoRA and the others none, as q and v beside k. The
runtime joins the base's weights once at load, and the adapters' when they enter a batch.
"""

from __future__ import annotations

from itertools import takewhile

from pcg.ir.graph import Graph, Node
from pcg.ir.program.program import ModelGraph


def fuse(model: ModelGraph) -> ModelGraph:
    """The model with linear operators of one input joined, and LoRA joined to them."""
    return model.map(lambda graph: fuse_lora(fuse_linears(graph)))


def fuse_linears(graph: Graph) -> Graph:
    """The graph with linear operators of one input joined, at the place of the first."""
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "linear" and all(
            name in graph.parameters_by_name for name in node.inputs[1:]
        ):
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
        _common_scope(nodes),
    )


def _common_scope(nodes: list[Node]) -> str:
    """The path of the innermost module that holds all nodes."""
    levels = zip(*(node.scope.split(".") for node in nodes), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def fuse_lora(graph: Graph) -> Graph:
    """The graph with the LoRA of linear operators joined to them, where any output has one."""
    new: dict[str, Node] = {}
    dropped: set[str] = set()
    for node in graph.nodes:
        if node.op not in ("linear", "linear_group"):
            continue
        pairs = _loras_of(graph, node)
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
    nodes = tuple(new.get(n.name, n) for n in graph.nodes if n.name not in dropped)
    return graph.replace(nodes=nodes)


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

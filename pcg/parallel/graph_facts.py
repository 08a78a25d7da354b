"""What a graph says to a planner before ranks share it: gradients, last readers, tokens."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.analysis.trainable import reachable, trained
from pcg.ir.graph import Graph


def with_gradient(graph: Graph) -> frozenset[str]:
    """Values that a gradient may flow back to: what a layer hands on, and what adapters reach."""
    carried = (value.name for value in graph.inputs[: len(graph.outputs)])
    return reachable(graph, (*carried, *trained(graph)))


def nodes_of_tokens(
    graph: Graph, many_adapters: bool, outputs: Sequence[str] | None = None
) -> frozenset[str]:
    """Names of nodes that ranks may run on parts of the tokens.

    Args:
        graph: of whole tensors.
        many_adapters: whether each token of a batch has its own adapter; what reads adapters'
            weights then runs on all tokens.
        outputs: that nodes have to be behind; all by default.
    """
    adapter = {p.name for p in graph.parameters if p.role == "adapter"} if many_adapters else set()
    behind = graph if outputs is None else graph.replace(outputs=tuple(outputs))
    nodes = behind.without_dead_code().nodes
    return frozenset(node.name for node in nodes if adapter.isdisjoint(node.inputs))


def last_readers(graph: Graph) -> dict[int, list[str]]:
    """Values that no node after one reads, by its place; outputs are read to the end."""
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for name in (*node.inputs, *(value.name for value in node.outputs)):
            last[name] = place
    found: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in graph.outputs:
            found.setdefault(place, []).append(name)
    return found

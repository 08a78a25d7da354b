"""Sequence parallelism: the nodes that run on shards of the tokens, and a layer's ends."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.graph import Graph
from pcg.ir.layouts import token_part
from pcg.parallel.parallel_plan import Constraints


def token_sharded_nodes(
    graph: Graph, many_adapters: bool, outputs: Sequence[str] | None = None
) -> frozenset[str]:
    """Names of nodes that ranks may run on shards of the tokens.

    Args:
        graph: a graph of whole tensors.
        many_adapters: True if each token of a batch has its own adapter; nodes that read adapters'
            weights then run on all tokens.
        outputs: outputs of which one has to depend on a node; all by default.
    """
    adapter = {p.name for p in graph.parameters if p.role == "adapter"} if many_adapters else set()
    behind = graph if outputs is None else graph.replace(outputs=tuple(outputs))
    nodes = behind.without_dead_code().nodes
    return frozenset(node.name for node in nodes if adapter.isdisjoint(node.inputs))


def token_sharded_ends(graph: Graph) -> Constraints:
    """The constraints of a layer that takes shards of the tokens, and gives them to the next."""
    carried = [value.name for value in graph.inputs[: len(graph.outputs)]]
    return Constraints(
        inputs={name: token_part(graph.types[name]) for name in carried},
        outputs={name: token_part(graph.types[name]) for name in graph.outputs},
    )

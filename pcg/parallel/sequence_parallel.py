"""What sequence parallelism asks of a layer: which nodes run on shards of tokens, and its ends."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.graph import Graph
from pcg.ir.layouts import token_part
from pcg.parallel.parallel_plan import Constraints


def token_sharded_nodes(
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


def token_sharded_ends(graph: Graph) -> Constraints:
    """A layer that is handed parts of the tokens, and hands them on."""
    carried = [value.name for value in graph.inputs[: len(graph.outputs)]]
    return Constraints(
        inputs={name: token_part(graph.types[name]) for name in carried},
        outputs={name: token_part(graph.types[name]) for name in graph.outputs},
    )

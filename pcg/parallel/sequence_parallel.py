"""Sequence parallelism: the nodes that run on token shards, and a layer's ends.

A value gathered from the ranks' tokens is not saved for backward, but gathered again (Korthikanti
et al. 2022, §4.2.2) if backward reads it, or reads a value recomputed from it without a matrix
product (`pcg.passes.memory`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import token_part
from pcg.ir.operators import operator
from pcg.parallel.costs.layer_costs import backward_of
from pcg.parallel.parallel_plan import Constraints


def token_sharded_nodes(
    graph: Graph, many_adapters: bool, outputs: Sequence[str] | None = None
) -> frozenset[str]:
    """Return names of nodes that ranks may run on token shards.

    Args:
        graph: a graph of whole tensors.
        many_adapters: True if each token has its own adapter; readers of adapters' weights then run
            on all tokens.
        outputs: outputs, any of which must depend on a node; all by default.
    """
    adapter = {p.name for p in graph.parameters if p.role == "adapter"} if many_adapters else set()
    behind = graph if outputs is None else graph.replace(outputs=tuple(outputs))
    nodes = behind.without_dead_code().nodes
    return frozenset(node.name for node in nodes if adapter.isdisjoint(node.inputs))


def token_sharded_ends(graph: Graph) -> Constraints:
    """Return the constraints of a layer that takes and returns token shards."""
    carried = [value.name for value in graph.inputs[: len(graph.outputs)]]
    return Constraints(
        inputs={name: token_part(graph.types[name]) for name in carried},
        outputs={name: token_part(graph.types[name]) for name in graph.outputs},
    )


def saved_reads(graph: Graph, active: Container[str]) -> frozenset[tuple[str, int]]:
    """Return the inputs of nodes that backward needs, as (node's name, index).

    A gradient may flow back to the `active` values.
    """
    needed: set[str] = set()
    reads: set[tuple[str, int]] = set()
    for node in reversed(graph.nodes):
        inputs, outputs = gradient_reads(graph, node, active)
        needed.update(node.outputs[index].name for index in outputs)
        is_recomputed = not operator(node.op).is_product
        if is_recomputed and any(value.name in needed for value in node.outputs):
            inputs = set(range(len(node.inputs)))
        needed.update(node.inputs[index] for index in inputs)
        reads.update((node.name, index) for index in inputs)
    return frozenset(reads)


def gradient_reads(graph: Graph, node: Node, active: Container[str]) -> tuple[set[int], set[int]]:
    """Return indices of the inputs and of the outputs that a node's gradient reads."""
    needs = tuple(name in active for name in node.inputs)
    if not any(needs) or not node.output.type.is_float:
        return set(), set()
    types, outputs = graph.types_of(node)
    try:
        backward = backward_of(node.op, types, outputs, dict(node.attributes), needs)
    except UnsupportedError:
        return set(), set()  # not trained
    read = {name for reader in backward.nodes for name in reader.inputs}
    return (
        {index for index in range(len(types)) if f"i{index}" in read},
        {index for index in range(len(outputs)) if f"o{index}" in read},
    )

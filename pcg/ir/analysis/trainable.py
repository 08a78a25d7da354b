"""The trained parameters of a graph, and the values that a gradient may flow back to."""

from __future__ import annotations

from collections.abc import Iterable

from pcg.ir.graph import Graph
from pcg.ir.operators import operator


def trained(graph: Graph) -> tuple[str, ...]:
    """Adapters' parameters that a gradient of an output flows back to.

    VeRA's shared matrices are an adapter's, and are not trained: operators take them for constants.
    """
    found = set(graph.outputs)
    for node in reversed(graph.nodes):
        if any(value.name in found for value in node.outputs):
            constants = operator(node.op).constant_in
            found.update(name for i, name in enumerate(node.inputs) if i not in constants)
    return tuple(p.name for p in graph.parameters if p.role == "adapter" and p.name in found)


def reachable(graph: Graph, sources: Iterable[str]) -> frozenset[str]:
    """The sources, and the values through which a gradient flows back to them."""
    found = set(sources)
    for node in graph.nodes:
        constants = operator(node.op).constant_in
        if any(name in found for i, name in enumerate(node.inputs) if i not in constants):
            found.update(value.name for value in node.outputs if value.type.is_float)
    return frozenset(found)

"""The bypass networks of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import Sharding
from pcg.ir.types import State


@dataclass(frozen=True)
class BypassSite:
    """One bypass network of a layer, by the path of its module and the names of nodes and weights.

    `is_row` is True if what it adds to is a sum over ranks; None where that is whole.
    """

    name: str
    nodes: tuple[str, ...]
    weights: tuple[str, ...]
    is_row: bool | None


def bypass_sites(graph: Graph, base: Mapping[str, Sharding]) -> tuple[BypassSite, ...]:
    """The bypass networks of a layer of whole tensors, by the ways of the base's nodes."""
    import networkx  # 11 MiB, which a process that loads a program does without

    added = [node for node in graph.nodes if node.name not in base]
    made = {value.name: node.name for node in added for value in node.outputs}
    adapter = {p.name for p in graph.parameters if p.role == "adapter"}
    links = networkx.Graph()
    links.add_nodes_from(node.name for node in added)
    for node in added:
        for name in node.inputs:
            if name in made:
                links.add_edge(node.name, made[name])
            elif name in adapter:
                links.add_edge(node.name, f"weight {name}")
    found = []
    for component in networkx.connected_components(links):
        nodes = [node for node in added if node.name in component]
        weights = dict.fromkeys(n for node in nodes for n in node.inputs if n in adapter)
        if weights:
            at = nodes[-1]
            reads = [base[name] for node in nodes for name in node.inputs if name in base]
            outputs = [rule.outputs[0] for rule in reads]
            is_row: bool | None = any(o.state is State.PRE_REDUCE for o in outputs)
            if not is_row and not any(o.dim for o in outputs):
                is_row = None
            names = tuple(node.name for node in nodes)
            found.append(BypassSite(at.scope or at.name, names, tuple(weights), is_row))
    return tuple(found)

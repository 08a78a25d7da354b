"""The bypass networks of a layer, and what their parallelizations are called.

Names of LoRA's candidates, by the layouts of A and B: FlexLLM's four (v1 figure 5, v2 figure 4),
Punica's (§7), S-LoRA's (§6), weights gathered where they are read (as fully sharded data
parallelism does), and copies of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx

from pcg.ir.graph import Graph
from pcg.ir.layouts import REPLICATED, WHOLE, Layout, Sharding
from pcg.ir.types import State
from pcg.parallel.base_plan import COLUMN, ROW

_OF_COLUMN = {
    (REPLICATED, COLUMN): "FlexLLM 1, Punica: replicate A, partition B",
    (ROW, COLUMN): "FlexLLM 2: partition the input, reduce s",
    (COLUMN, COLUMN): "FlexLLM 3, S-LoRA: partition A and B, gather s",
    (WHOLE, WHOLE): "FlexLLM 4: whole, partition the output",
    (REPLICATED, REPLICATED): "fully replicated",
}
_OF_ROW = {
    (ROW, REPLICATED): "FlexLLM 1, Punica: partition A, replicate B",
    (ROW, WHOLE): "FlexLLM 2: partition the input, reduce s",
    (ROW, COLUMN): "FlexLLM 3, S-LoRA: partition A and B, reduce s, add in the base's sum",
    (WHOLE, WHOLE): "FlexLLM 4: whole, combine the input",
    (REPLICATED, REPLICATED): "fully replicated",
}


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


def strategy_name(site: BypassSite, layouts: Mapping[str, Layout], gathered: frozenset[str]) -> str:
    """The name of a candidate: the papers' where it is theirs, else its layouts."""
    held = tuple(layouts.values())
    ends = [name.rpartition(".")[2] for name in layouts]
    if ends == ["lora_A", "lora_B"]:
        if len(gathered) == len(layouts) and set(held) == {COLUMN}:
            return "fully sharded, weights gathered"
        names = _OF_ROW if site.is_row else _OF_COLUMN
        if site.is_row is not None and not gathered and held in names:
            return names[held]
    if len(set(held)) == 1 and not gathered and held[0] in (WHOLE, REPLICATED):
        return "whole" if held[0] == WHOLE else "fully replicated"
    return ", ".join(
        f"{end} {'gathered ' if name in gathered else ''}{layout}"
        for end, (name, layout) in zip(ends, layouts.items(), strict=True)
    )

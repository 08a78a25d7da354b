"""The bypass networks of a layer, and the names of the ranks' algorithms at a site.

A name has the algorithm that ranks run, and the layouts that they hold if these differ. For LoRA,
with s = x Aᵀ, the layouts in which A, s and B are read identify the algorithm: FlexLLM's four (v1
figure 5, v2 figure 4), Punica's (§7), S-LoRA's (§6). Each algorithm holds its weights in certain
layouts; the name of a candidate that holds other layouts includes these. For example, ranks that
hold copies of A may take their columns of A and run FlexLLM's second algorithm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    WHOLE,
    Layout,
    Sharding,
    partitioned,
    token_part,
)
from pcg.ir.program.program import IN_OUT
from pcg.ir.types import State
from pcg.parallel.base_plan import COLUMN, ROW
from pcg.parallel.parallel_plan import ParallelPlan

# ------------------------------------------------------------------------------------- bypass sites


@dataclass(frozen=True)
class BypassSite:
    """A bypass network of a layer: its module's path and the names of its nodes and weights.

    `is_row` is True if it adds to a sum over ranks; None if to a whole value.
    """

    name: str
    nodes: tuple[str, ...]
    weights: tuple[str, ...]
    is_row: bool | None


def bypass_sites(graph: Graph, base: Mapping[str, Sharding]) -> tuple[BypassSite, ...]:
    """Return the bypass networks of a layer of whole tensors, by the rules of the base's nodes."""
    import networkx  # 11 MiB, not needed in a process that loads a program

    added = [node for node in graph.nodes if node.name not in base]
    makers = {value.name: node.name for node in added for value in node.outputs}
    adapter = {p.name for p in graph.parameters if p.role == "adapter"}
    links = networkx.Graph()
    links.add_nodes_from(node.name for node in added)
    for node in added:
        for name in node.inputs:
            if name in makers:
                links.add_edge(node.name, makers[name])
            elif name in adapter:
                links.add_edge(node.name, f"weight {name}")
    sites = []
    for component in networkx.connected_components(links):
        nodes = [node for node in added if node.name in component]
        weights = dict.fromkeys(n for node in nodes for n in node.inputs if n in adapter)
        if weights:
            at = nodes[-1]
            reads = [base[name] for node in nodes for name in node.inputs if name in base]
            outputs = [rule.outputs[0] for rule in reads]
            is_row: bool | None = any(o.state is State.PRE_REDUCE for o in outputs)
            if not is_row and not any(o.dim or o.part for o in outputs):
                is_row = None
            names = tuple(node.name for node in nodes)
            place = at.scope or at.name
            if at.op == "expert_expand_add":  # a module of experts has several parameters
                place = (
                    next(iter(weights))
                    .removesuffix(".lora_A")
                    .removesuffix(IN_OUT)
                    .removesuffix(".T")
                )
            sites.append(BypassSite(place, names, tuple(weights), is_row))
    return tuple(sites)


# ----------------------------------------------------------------------------------- strategy names


_Named = Mapping[tuple[Layout, Layout, Layout], tuple[str, tuple[Layout, Layout]]]
"""Names, and held layouts of A and B, by the layouts in which A, s and B are read (copy: whole)."""
_OF_COLUMN: _Named = {
    (WHOLE, WHOLE, COLUMN): (
        "FlexLLM 1, Punica: replicate A, partition B",
        (REPLICATED, COLUMN),
    ),
    (ROW, WHOLE, COLUMN): ("FlexLLM 2: partition the input, reduce s", (ROW, COLUMN)),
    (COLUMN, WHOLE, COLUMN): (
        "FlexLLM 3, S-LoRA: partition A and B, gather s",
        (COLUMN, COLUMN),
    ),
    (WHOLE, WHOLE, WHOLE): ("FlexLLM 4: whole, partition the output", (WHOLE, WHOLE)),
}
_OF_ROW: _Named = {
    (ROW, PRE_REDUCE, WHOLE): (
        "FlexLLM 1, Punica: partition A, replicate B",
        (ROW, REPLICATED),
    ),
    (ROW, WHOLE, WHOLE): ("FlexLLM 2: partition the input, reduce s", (ROW, WHOLE)),
    (ROW, WHOLE, COLUMN): (
        "FlexLLM 3, S-LoRA: partition A and B, reduce s, add in the base's sum",
        (ROW, COLUMN),
    ),
    (WHOLE, WHOLE, WHOLE): ("FlexLLM 4: whole, combine the input", (WHOLE, WHOLE)),
}
_LORA = ["lora_A", "lora_B"]


def strategy_name(
    graph: Graph, site: BypassSite, plan: ParallelPlan, gathered: Collection[str]
) -> str:
    """Return the name of a plan's algorithm at a site; readers gather the weights in `gathered`."""
    held = {name: plan.held[name] for name in site.weights}
    if all(at.state is State.ROUTED and at.sharers == 1 for at in held.values()):
        return "by expert: partition A and B over the experts"
    if [_end(name) for name in held] == _LORA and site.is_row is not None:
        return _of_lora(graph, site, plan, gathered)
    layouts = set(held.values())
    reads = _reads(graph, site, plan)
    is_whole = all(_plain(layout) == WHOLE for some in reads.values() for layout in some)
    if len(layouts) == 1 and not gathered and layouts <= {WHOLE, REPLICATED} and is_whole:
        return "whole" if layouts == {WHOLE} else "fully replicated"
    texts = []
    for name, layout in held.items():
        text = f"{_end(name)} {'gathered ' if name in gathered else ''}{layout}"
        others = [str(other) for other in reads[name] if _plain(other) != _plain(layout)]
        is_other = others and name not in gathered
        texts.append(f"{text} read {' and '.join(others)}" if is_other else text)
    return ", ".join(texts)


def algorithm(strategy: str) -> str:
    """Return the short name of a strategy's algorithm, without the layouts of its weights."""
    return strategy.partition(";")[0].partition(":")[0]


def _of_lora(graph: Graph, site: BypassSite, plan: ParallelPlan, gathered: Collection[str]) -> str:
    a, b = site.weights
    reads = _reads(graph, site, plan)
    nodes = [node for node in graph.nodes if node.name in site.nodes]
    down = next(node for node in nodes if a in node.inputs)
    up = next(node for node in nodes if b in node.inputs)
    site_values = {value.name for node in nodes for value in node.outputs}
    (s,) = {
        layout
        for name, layout in zip(up.inputs, plan.nodes[up.name].rule.inputs, strict=True)
        if name in site_values
    }
    key = _plain(reads[a][0]), _plain(s), _plain(reads[b][0])
    known = _OF_ROW if site.is_row else _OF_COLUMN
    name, usual = known.get(key, (f"A {key[0]}, s {key[1]}, B {key[2]}", key[::2]))
    x = down.inputs[0]
    if plan.nodes[down.name].rule.inputs[0] == token_part(graph.types[x]) != WHOLE:
        name = f"A on each rank's tokens, gather s, B {key[2]}"
    held = tuple(_of_all_experts(plan.held[weight]) for weight in site.weights)
    if gathered and set(held) == {COLUMN} and len(gathered) == len(held):
        return f"{name}; held fully sharded, weights gathered"
    if held != usual and not gathered and set(held) == {REPLICATED}:
        return f"{name}; held fully replicated"
    texts = [
        f"{letter} {'gathered from' if weight in gathered else 'held'} {layout}"
        for weight, letter, layout, other in zip(site.weights, "AB", held, usual, strict=True)
        if weight in gathered or layout != other
    ]
    return "; ".join([name, ", ".join(texts)]) if texts else name


def _reads(graph: Graph, site: BypassSite, plan: ParallelPlan) -> dict[str, list[Layout]]:
    layouts: dict[str, list[Layout]] = {name: [] for name in site.weights}
    for node in graph.nodes:
        if node.name in site.nodes:
            rule = plan.nodes[node.name].rule
            for name, layout in zip(node.inputs, rule.inputs, strict=True):
                if name in layouts:
                    layouts[name].append(layout)
    return layouts


def _plain(layout: Layout) -> Layout:
    """Return the layout as a forward sees it, where a copy equals a whole."""
    return WHOLE if layout == REPLICATED else _of_all_experts(layout)


def _of_all_experts(layout: Layout) -> Layout:
    """Return the layout of the same parts of features, where ranks share some of the experts."""
    return partitioned(layout.part) if layout.part else layout


def _end(name: str) -> str:
    return name.rpartition(".")[2]

"""The base model's sharding: Megatron's tensor parallelism, derived from a layer's graph.

    column    y = x [W_1; W_2]ᵀ    rows of W on each rank: x whole, y sharded
    row       y = x [W_1, W_2]ᵀ    columns of W: x sharded, y a sum over the ranks

A product of a whole value is column-parallel if its result reaches another product, through
operators that treat all shards equally, before it meets a whole value; that other product is
row-parallel. These are q, k, v and o of attention, and up (gate) and down of an MLP, under any
names. Experts are sharded like MLPs, as by transformers' `packed_colwise` and `rowwise`, with a
whole router. Heads stay whole, as shards of q, k and v consist of heads; if the ranks do not divide
the KV heads, `pcg.passes.repeat_heads` gives each rank the heads that it needs.

A user's plan, in transformers' terms (`base_model_tp_plan`), replaces the derived plan.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import gcd

import sympy

from pcg.errors import ParallelError
from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import REPLICATED, Layout, partitioned
from pcg.ir.program.program import adapted_weight
from pcg.options import STYLES

COLUMN, ROW = partitioned(-2), partitioned(-1)
_LAYOUTS = dict(zip(STYLES, (COLUMN, ROW, REPLICATED), strict=True))


def base_plan(
    graph: Graph, degree: int, styles: Mapping[str, str] | None = None
) -> dict[str, Layout]:
    """Return layouts of the weights of a layer's matrix products, by parameter; others stay whole.

    Args:
        graph: a layer's graph without bypass networks.
        styles: the user's plan, `PlanOptions.styles`; products without a style are replicated.
    Raises:
        ParallelError: the degree divides neither heads nor products (the message names degrees that
            do), or a path in `styles` is not a linear operator of the layer.
    """
    plan = _given(graph, styles) if styles else _pairs(graph, degree)
    sizes = list(_sizes(graph, plan))
    if any(size % degree for _, size in sizes):
        what, size = next((what, size) for what, size in sizes if size % degree)
        fitting = sympy.divisors(gcd(*(size for _, size in sizes)))
        raise ParallelError(
            f"tp={degree} does not divide {what}={size} of {graph.name}; use one of "
            f"{', '.join(map(str, fitting))}" + _way_out(graph, degree, plan)
        )
    return plan


def _way_out(graph: Graph, degree: int, plan: Mapping[str, Layout]) -> str:
    """Return a hint with a plan of the product pairs that the degree divides; may be empty."""
    fitting: dict[str, str] = {}
    paths = _paths(graph)
    for pair in _plans_of_pairs(graph, plan):
        if not any(size % degree for _, size in _sizes(graph, pair)):
            fitting |= {paths[weight]: _style(layout) for weight, layout in pair.items()}
    if not fitting:
        return ""
    return f", or shard these alone: --tp-plan (tp_plan=) with {json.dumps(fitting)}"


def _style(layout: Layout) -> str:
    return next(style for style, candidate in _LAYOUTS.items() if candidate == layout)


def _plans_of_pairs(graph: Graph, plan: Mapping[str, Layout]) -> Iterator[Mapping[str, Layout]]:
    """Yield each row-parallel product of a plan with its column-parallel sources."""
    makers: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        weight = _frozen_weight(graph, node)
        behind = frozenset().union(*(makers.get(name, ()) for name in node.inputs))
        layout = None if weight is None else plan.get(weight)
        if weight is not None and layout == ROW and behind:
            yield dict.fromkeys(sorted(behind), COLUMN) | {weight: ROW}
        if weight is not None:
            behind = frozenset([weight] if layout == COLUMN else [])
        makers.update((value.name, behind) for value in node.outputs)


def _paths(graph: Graph) -> dict[str, str]:
    weights = [w for node in graph.nodes if (w := _frozen_weight(graph, node)) is not None]
    sources = {w: graph.parameters_by_name[w].source.removesuffix(".weight") for w in weights}
    return {w: source.rpartition("{layer}.")[2] for w, source in sources.items()}


def _given(graph: Graph, styles: Mapping[str, str]) -> dict[str, Layout]:
    paths = _paths(graph)
    plan = dict.fromkeys(paths, REPLICATED)
    for module, style in styles.items():
        wanted = f".{module.rpartition('*.')[2]}"
        named = [w for w in paths if f".{paths[w]}".endswith(wanted)]
        if not named:
            known = ", ".join(dict.fromkeys(paths.values()))
            raise ParallelError(
                f"tp_plan: {module} is no linear operator of {graph.name}; it has {known}"
            )
        plan |= dict.fromkeys(named, _LAYOUTS[style])
    return plan


def _sizes(graph: Graph, plan: Mapping[str, Layout]) -> Iterator[tuple[str, int]]:
    attentions = partitioned_attentions(graph, plan)
    for node in graph.nodes:
        if node.name in attentions:
            yield "num_attention_heads", graph.types[node.inputs[0]].features[-2]
    for name, layout in plan.items():
        if layout == REPLICATED:
            continue
        kind = "rows" if layout == COLUMN else "columns"
        yield f"the {kind} of {name}", graph.types[name].features[layout.dim]


def partitioned_attentions(graph: Graph, plan: Mapping[str, Layout]) -> frozenset[str]:
    """Return names of attentions with column-parallel queries: ranks share their heads.

    `graph` is a layer without bypass networks, `plan` has the layouts of its weights.
    """
    has_part: set[str] = set()
    attentions = set()
    for node in graph.nodes:
        if node.op == "attention" and node.inputs[0] in has_part:
            attentions.add(node.name)
        weight = _frozen_weight(graph, node)
        is_part = weight is None and any(name in has_part for name in node.inputs)
        if is_part or plan.get(weight or "") == COLUMN:
            has_part.update(value.name for value in node.outputs)
    return frozenset(attentions)


def _pairs(graph: Graph, degree: int) -> dict[str, Layout]:
    plan: dict[str, Layout] = {}
    makers: dict[str, frozenset[str]] = {}
    carried = {value.name for value in graph.inputs[: len(graph.outputs)]}
    for node in graph.nodes:
        weight = _frozen_weight(graph, node)
        if node.op == "expert_linear":
            # Each rank has a part of every expert, and so needs the router's whole output.
            routers = makers.get(node.inputs[1], frozenset())
            plan |= dict.fromkeys(routers, REPLICATED)
            makers = {name: weights - routers for name, weights in makers.items()}
        behind = frozenset().union(*(makers.get(name, ()) for name in node.inputs))
        makers_of_output = behind
        if weight is None:
            values = [name for name in node.inputs if name not in graph.parameters_by_name]
            adds_whole = node.op in ("add", "sub") and not all(makers.get(n) for n in values)
            meets_whole = adds_whole or not carried.isdisjoint(node.inputs)
            if behind and (meets_whole or _is_latent(graph, node)):
                # A shard meets a whole value: those products form no pair with a later product.
                for name in behind:
                    plan.pop(name, None)
                makers_of_output = frozenset()
            if node.op == "attention" and graph.types[node.inputs[1]].features[-2] % degree:
                for name in {*makers.get(node.inputs[1], ()), *makers.get(node.inputs[2], ())}:
                    plan[name] = REPLICATED
        elif behind & plan.keys():
            plan[weight], makers_of_output = ROW, frozenset()
        else:
            plan[weight], makers_of_output = COLUMN, frozenset([weight])
        makers.update((value.name, makers_of_output) for value in node.outputs)
    for name in graph.outputs:
        for weight in makers.get(name, ()):
            plan.pop(weight, None)
    return plan


def _is_latent(graph: Graph, node: Node) -> bool:
    """Return whether a node reads features that each rank needs whole, for its heads.

    These are a product's features that are normed together for products alone, as the latents of
    attention, and features that are repeated for all heads.
    """
    if node.op == "expand":
        return bool(graph.types[node.inputs[0]].shape[1:-1] == (1,))
    if node.op not in ("rms_norm", "layer_norm") or len(node.output.type.dims) != 2:
        return False
    made = graph.producers.get(node.inputs[0])
    while made is not None and made.op in ("slice", "reshape"):
        made = graph.producers.get(made.inputs[0])
    readers = graph.consumers.get(node.name, ())
    reads = [_frozen_weight(graph, reader) for reader in readers]
    return made is not None and _frozen_weight(graph, made) is not None and all(reads)


def _frozen_weight(graph: Graph, node: Node) -> str | None:
    parameter = graph.parameters_by_name.get(adapted_weight(node) or "")
    return parameter.name if parameter is not None and parameter.role == "frozen" else None

"""The base model's sharding: Megatron's tensor parallelism, derived from a layer's graph.

    column    y = x [W_1; W_2]ᵀ    rows of W on each rank: x whole, y sharded
    row       y = x [W_1, W_2]ᵀ    columns of W: x sharded, y a sum over the ranks

A product of a whole value is column-parallel if its result reaches another product, through
operators that treat all shards equally, before it meets a whole value; that other product is
row-parallel. These are q, k, v and o of attention, and up (gate) and down of an MLP, under any
names. Experts are sharded like MLPs, as by transformers' `packed_colwise` and `rowwise`, with a
whole router, or each rank has some of the experts, whole (expert parallelism):

    experts   y[t, j] = W[e] x[t]      W[e] on a single rank, which computes the rows of its experts

or several ranks share some of the experts, and each has a part of their matrices.

Heads stay whole, as shards of q, k and v consist of heads; if the ranks do not divide
the KV heads, `pcg.passes.repeat_heads` gives each rank the heads that it needs.

A user's plan, in transformers' terms (`base_model_tp_plan`), replaces the derived plan.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd

import sympy

from pcg.errors import ParallelError
from pcg.formats.registry import FORMATS
from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    ROUTED,
    Layout,
    Sharding,
    of_experts,
    partitioned,
)
from pcg.ir.operators.base import Types
from pcg.ir.program.program import adapted_weight
from pcg.ir.types import State, TensorType, is_format
from pcg.options import STYLES

COLUMN, ROW, EXPERTS = partitioned(-2), partitioned(-1), of_experts(-3)
_LAYOUTS = dict(zip(STYLES, (COLUMN, ROW, REPLICATED), strict=True))


def base_plan(
    graph: Graph,
    degree: int,
    styles: Mapping[str, str] | None = None,
    ep: int = 1,
) -> dict[str, Layout]:
    """Return layouts of the weights of a layer's matrix products, by parameter; others stay whole.

    Args:
        graph: a layer's graph without bypass networks.
        styles: the user's plan, `PlanOptions.styles`; products without a style are replicated.
        ep: the number of parts of the experts; several ranks share those of a part, each with parts
            of their matrices.
    Raises:
        ParallelError: the degree divides neither heads nor products (the message names degrees that
            do), or a path in `styles` is not a linear operator of the layer.
    """
    plan = _given(graph, styles) if styles else _pairs(graph, degree, ep)
    sizes = list(_sizes(graph, plan, degree))
    uneven = next((each for each in sizes if each[1] % each[2]), None)
    if uneven is not None:
        what, size, parts = uneven
        if parts < degree:
            raise ParallelError(
                f"ep={ep} of tp={degree} ranks needs {what}={size} of {graph.name} in {parts} "
                f"equal parts; use another degree, or leave out ep={ep}"
            )
        fitting = sympy.divisors(gcd(*(size for _, size, parts in sizes if parts == degree)))
        way_out = ", or ep=1" if ep > 1 else _way_out(graph, degree, plan)
        raise ParallelError(
            f"tp={degree} does not divide {what}={size} of {graph.name}; use one of "
            f"{', '.join(map(str, fitting))}{way_out}"
        )
    return plan


def routed_products(graph: Graph) -> list[Node]:
    """Return a layer's products by experts that its tokens choose.

    Products by constant blocks, which the layer reads as an input, have the same operator.
    """
    products = (node for node in graph.nodes if node.op == "expert_linear")
    return [node for node in products if node.inputs[1] in graph.producers]


def check_experts(blocks: Iterable[Graph], ep: int | None) -> None:
    """Refuse a number of parts of experts for a model without any. ParallelError: says so."""
    if ep is not None and not any(map(routed_products, blocks)):
        raise ParallelError(f"ep={ep} has no effect for a model without experts; leave it out")


def check_cuts(graph: Graph, plan: Mapping[str, Layout], degree: int) -> None:
    """Check that parts of a layer's quantized experts end between the blocks of their formats.

    Raises:
        ParallelError: a part would end inside a block; names the degrees that fit.
    """
    for name, layout in plan.items():
        parameter = graph.parameters_by_name[name]
        if not is_format(parameter.type.dtype):
            continue
        *_, rows, columns = parameter.type.features
        first, end = parameter.rows or (0, rows)
        spans = {-2: (first, end), -1: (0, columns)}
        for dim, count in layout.cuts(degree):
            if dim in spans:
                start, stop = spans[dim]
                spans[dim] = start, start + (stop - start) // count
        shape = end, columns
        FORMATS[parameter.type.dtype].check_cut(spans[-2], spans[-1], shape, parameter.source)


def shared_rules(
    node: Node, types: Types, outputs: Types, rules: Sequence[Sharding], degree: int
) -> Iterator[Sharding]:
    """Yield the rules for rows of experts that several ranks share, each with parts of features.

    They are the rules for parts of the features of rows of choices, [T, k, n], of operators that
    treat rows equally: a rank computes the same of the rows of its experts.
    """
    if all(at != ROUTED for rule in rules for at in rule.outputs):
        return
    for sharers in (n for n in range(2, degree) if degree % n == 0):
        for rule in rules:
            pairs = zip((*types, *outputs), (*rule.inputs, *rule.outputs), strict=True)
            every = [_shared(node, type_, at, sharers) for type_, at in pairs]
            layouts = [layout for layout in every if layout is not None]
            if len(layouts) == len(every) and any(at.part and not at.dim for at in layouts):
                count = len(types)
                yield Sharding(tuple(layouts[:count]), tuple(layouts[count:]), rule.op)


def _shared(node: Node, type_: TensorType, at: Layout, sharers: int) -> Layout | None:
    """Return a rule's layout of rows or weights of experts if ranks share these; None for none."""
    is_of_experts = node.op.startswith("expert_")
    if at == PRE_REDUCE and is_of_experts and not type_.is_token_wise:
        return of_experts(-3, sharers)
    if at.state is not State.PARTITIONED:
        return at if at.state is not State.ROUTED else None
    if type_.is_token_wise:
        return of_experts(0, sharers, at.dim) if len(type_.dims) == 3 and at.dim == -1 else None
    if not is_of_experts:
        return None
    return of_experts(-3 if len(type_.dims) == 3 else -3 - at.dim, sharers, at.dim)


def _way_out(graph: Graph, degree: int, plan: Mapping[str, Layout]) -> str:
    """Return a hint with a plan of the product pairs that the degree divides; may be empty."""
    fitting: dict[str, str] = {}
    paths = _paths(graph)
    for pair in _plans_of_pairs(graph, plan):
        if not any(size % parts for _, size, parts in _sizes(graph, pair, degree)):
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


def _sizes(graph: Graph, plan: Mapping[str, Layout], degree: int) -> Iterator[tuple[str, int, int]]:
    """Yield the sizes that ranks divide, each with the number of its parts."""
    kinds = {-1: "columns", -2: "rows", -3: "experts"}
    attentions = partitioned_attentions(graph, plan)
    for node in graph.nodes:
        if node.name in attentions:
            yield "num_attention_heads", graph.types[node.inputs[0]].features[-2], degree
    for name, layout in plan.items():
        for dim, parts in layout.cuts(degree):
            yield f"the {kinds[dim]} of {name}", graph.types[name].features[dim], parts


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


def _pairs(graph: Graph, degree: int, ep: int) -> dict[str, Layout]:
    plan: dict[str, Layout] = {}
    makers: dict[str, frozenset[str]] = {}
    carried = {value.name for value in graph.inputs[: len(graph.outputs)]}
    products = routed_products(graph)
    for node in graph.nodes:
        weight = _frozen_weight(graph, node)
        if node.op == "expert_linear":
            # Each rank has rows of every token, and so needs the router's whole output.
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
        elif ep == degree and node in products:
            plan[weight], makers_of_output = EXPERTS, frozenset()
        elif behind & plan.keys():
            plan[weight], makers_of_output = ROW, frozenset()
        else:
            plan[weight], makers_of_output = COLUMN, frozenset([weight])
        makers.update((value.name, makers_of_output) for value in node.outputs)
    for name in graph.outputs:
        for weight in makers.get(name, ()):
            plan.pop(weight, None)
    if 1 < ep < degree:
        for weight in {node.inputs[2] for node in products} & plan.keys():
            plan[weight] = of_experts(-3, degree // ep, plan[weight].dim)
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
    source = graph.producers.get(node.inputs[0])
    while source is not None and source.op in ("slice", "reshape"):
        source = graph.producers.get(source.inputs[0])
    readers = graph.consumers.get(node.name, ())
    reads = [_frozen_weight(graph, reader) for reader in readers]
    return source is not None and _frozen_weight(graph, source) is not None and all(reads)


def _frozen_weight(graph: Graph, node: Node) -> str | None:
    parameter = graph.parameters_by_name.get(adapted_weight(node) or "")
    return parameter.name if parameter is not None and parameter.role == "frozen" else None

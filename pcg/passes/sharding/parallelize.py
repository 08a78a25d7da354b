"""Parallelize: the graphs of a model over the ranks of a tensor-parallel group.

The base's plan comes first, from each layer's own graph (`pcg.parallel.base_plan`), and does not
depend on adapters; bypass networks are sharded under it (dependent parallelization, FlexLLM §5.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import Layout, layout_of, token_part
from pcg.ir.program.program import ModelGraph, token_embedding
from pcg.parallel.base_plan import COLUMN, base_plan, partitioned_attentions
from pcg.parallel.costs.layer_costs import ByteCosts, LayerCosts
from pcg.parallel.parallel_plan import Constraints, ParallelPlan
from pcg.parallel.planner import plan_graph
from pcg.parallel.search import Search
from pcg.parallel.sequence_parallel import token_sharded_ends, token_sharded_nodes
from pcg.parallel.sharder import shard
from pcg.passes.sharding.localize import localize
from pcg.passes.sharding.repeat_heads import repeat_heads
from pcg.passes.sharding.split_fused_projections import split_fused_projections


@dataclass(frozen=True)
class Sharded:
    """A model over ranks.

    Attributes:
        typed: its graphs with layouts in their types and parallelization operators between.
        local: the graphs of one rank.
        searches: of its blocks.
        plans: of its blocks.
    """

    typed: ModelGraph
    local: ModelGraph
    searches: tuple[Search, ...]
    plans: tuple[ParallelPlan, ...]

    @property
    def parts_tokens(self) -> bool:
        """Whether ranks hold parts of the tokens between the base's products."""
        return layout_of(self.typed.epilogue.inputs[0].type).dim != 0


def parallelize(
    model: ModelGraph,
    base: ModelGraph,
    degree: int,
    costs: LayerCosts | None = None,
    trains: bool = True,
    tp_plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
) -> Sharded:
    """A model over so many ranks.

    Args:
        model: with bypass networks attached, or without.
        base: the same without.
        degree: number of ranks, at least 2.
        costs: by which bypass networks are parallelized; bytes between ranks by default.
        trains: whether there is a backward, and each adapter's weight is one tensor, not those of a
            batch's many adapters.
        tp_plan: the base's plan, where the user gives one.
        sequence_parallel: whether ranks hold parts of the tokens between the base's products.
    Raises:
        ParallelError: the degree divides neither heads nor products; those that do are named.
    """
    costs = costs or ByteCosts(degree, sequence_parallel)
    searches = tuple(
        search_layer(block, plain, degree, costs, trains, tp_plan, sequence_parallel)
        for block, plain in zip(model.blocks, base.blocks, strict=True)
    )
    plans = tuple(search.plan() for search in searches)
    blocks = tuple(
        shard(search.graph, degree, found) for search, found in zip(searches, plans, strict=True)
    )
    ends = []
    for graph, is_first in ((model.prologue, True), (model.epilogue, False)):
        layouts = _vocabulary(base, degree, is_first=is_first)
        ends_of = _handed(model, is_first=is_first) if sequence_parallel else Constraints()
        fixed = dataclasses.replace(ends_of, layouts=layouts)
        nodes: frozenset[str] = frozenset()
        if sequence_parallel:
            nodes = token_sharded_nodes(graph, not trains, graph.outputs[: len(blocks[0].outputs)])
        found = plan_graph(
            graph, degree, ByteCosts(degree, sequence_parallel), fixed, trains, nodes
        )
        ends.append(shard(graph, degree, found))
    typed = dataclasses.replace(model, prologue=ends[0], blocks=blocks, epilogue=ends[1])
    local = typed.map(lambda graph: localize(graph, degree))
    return Sharded(typed, local, searches, plans)


def search_layer(
    block: Graph,
    plain: Graph,
    degree: int,
    costs: LayerCosts,
    trains: bool = True,
    tp_plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
) -> Search:
    """The search for a layer's bypass networks, under the plan of the base's own layer."""
    base = split_fused_projections(plain)
    layouts = base_plan(base, degree, tp_plan)
    attentions = partitioned_attentions(base, layouts)
    base = repeat_heads(base, degree, attentions)
    ends = token_sharded_ends(base) if sequence_parallel else Constraints()
    fixed = dataclasses.replace(ends, layouts=layouts)
    nodes = token_sharded_nodes(base, many_adapters=False) if sequence_parallel else frozenset()
    found = plan_graph(base, degree, ByteCosts(degree, sequence_parallel), fixed, token_nodes=nodes)
    whole = repeat_heads(split_fused_projections(block), degree, attentions)
    return Search(whole, degree, costs, layouts, found.rules, trains, sequence_parallel)


def _handed(model: ModelGraph, *, is_first: bool) -> Constraints:
    """Parts of the tokens of what the prologue hands the first layer, or the last the epilogue."""
    count = len(model.blocks[0].outputs)
    if is_first:
        types = model.prologue.types
        return Constraints(
            outputs={n: token_part(types[n]) for n in model.prologue.outputs[:count]}
        )
    return Constraints(inputs={v.name: token_part(v.type) for v in model.epilogue.inputs[:count]})


def _vocabulary(base: ModelGraph, degree: int, *, is_first: bool) -> dict[str, Layout]:
    """Rows of the token embedding, or of the output's weight, on each rank, if equally many."""
    if is_first:
        graph, node = base.prologue, token_embedding(base.prologue)
        weight = node.inputs[0] if node is not None else None
    else:
        graph = base.epilogue
        products = [node for node in graph.nodes if node.op == "linear"]
        weight = products[-1].inputs[1] if products else None
    if weight is None or graph.types[weight].features[0] % degree:
        return {}
    return {weight: COLUMN}

"""Shard: plan a model over ranks, and write the layouts into the types of its graphs.

The base's plan comes first, and does not depend on adapters; bypass networks are sharded under it
(dependent parallelization, FlexLLM §5.1). Where a value has to change its layout, a parallelization
operator stands between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph
from pcg.ir.layouts import Layout, Sharding, token_part
from pcg.ir.program.program import ModelGraph, token_embedding
from pcg.options import MemoryBudget
from pcg.parallel.base_plan import COLUMN, base_plan
from pcg.parallel.costs.layer_costs import ByteCosts, DeviceCosts, LayerCosts
from pcg.parallel.costs.mixed_costs import MixedCosts
from pcg.parallel.costs.rank_costs import RankCosts
from pcg.parallel.parallel_plan import Constraints, ParallelPlan
from pcg.parallel.planner import Planner
from pcg.parallel.search import Search
from pcg.parallel.sequence_parallel import token_sharded_ends, token_sharded_nodes
from pcg.parallel.sharder import shard
from pcg.passes.graphs.localize import Localize
from pcg.passes.graphs.pass_base import Pass
from pcg.passes.memory.joint import Joint, JointSearch
from pcg.passes.stages import Attached, Prepared, Sharded


@dataclass(frozen=True)
class PlanBase(Pass[Attached, Prepared]):
    """Choose the layouts of the base's weights, from each layer's own graph or as the user says.

    Attributes:
        degree: the number of ranks.
        styles: the user's plan, a style by module path; empty to read Megatron's off the graph.
    Raises:
        ParallelError: the degree divides neither heads nor products; those that do are named.
    """

    name = "plan_base"
    degree: int
    styles: Mapping[str, str] = field(default_factory=dict)

    def run(self, before: Attached) -> Prepared:
        layouts = tuple(base_plan(block, self.degree, self.styles) for block in before.base.blocks)
        return Prepared(before.base, before.serving, before.training, layouts)


@dataclass(frozen=True)
class Shard(Pass[Prepared, Sharded]):
    """Search for the layouts of bypass networks, and write all layouts into the graphs.

    Attributes:
        degree: the number of ranks.
        costs: the costs that bypass networks to train are parallelized by; bytes between ranks by
            default.
        steps: the costs of the steps of a program that serves, whose bypass networks have the
            layouts that are best for all of them together; `costs` by default.
        sequence_parallel: True if ranks hold parts of the tokens between the base's products.
        budget: what a training step may save for backward; where that is a number of bytes that
            binds, layouts are chosen together with what is kept (`pcg.passes.memory.joint`).
        rank_costs: the seconds of a rank's nodes; None where they are not known.
        is_lossy: True if what is saved may be in codes (`pcg.passes.graphs.lossy`).
    """

    name = "shard"
    degree: int
    costs: LayerCosts | None = None
    sequence_parallel: bool = False
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    rank_costs: RankCosts | None = None
    is_lossy: bool = False
    steps: Sequence[DeviceCosts] = ()

    def run(self, before: Prepared) -> Sharded:
        base, *_ = dataclasses.replace(self, costs=None)._over_ranks(before.base, before, True)
        found = served = self._over_ranks(before.serving, before, False)
        training, joint = None, None
        if before.training is not None:
            found = self._over_ranks(before.training, before, True)
            joint = self._joint(before, base, found[1])
            if joint is not None and joint.best is not joint.sequential:
                plans = joint.best.plans
                typed = self._typed(before.training, before, True, found[1], plans)
                found = (typed, found[1], plans)
            training = found[0]
        serving, searches, plans = served
        return Sharded(base, serving, training, before.layouts, *found, joint, searches, plans)

    def _joint(
        self, given: Prepared, base: ModelGraph, searches: tuple[Search, ...]
    ) -> Joint | None:
        """Layouts that are chosen with what is kept; None where no number of bytes binds."""
        model = given.training
        if model is None or self.rank_costs is None or self.budget.size_bytes is None:
            return None
        localize = Localize(self.degree).run

        def local(plans: tuple[ParallelPlan, ...]) -> ModelGraph:
            return self._typed(model, given, True, searches, plans).map(localize)

        search = JointSearch(
            base.map(localize),
            given.base_blocks(model),
            searches,
            local,
            self.rank_costs,
            self.budget,
            self.is_lossy,
        )
        try:
            return search.find()
        except UnsupportedError:
            return None  # it is not trained

    def search(
        self, block: Graph, plain: Graph, layouts: Mapping[str, Layout], trains: bool = True
    ) -> Search:
        """The search for a layer's bypass networks, under the plan of the base's own layer.

        `plain` is the same layer without bypass networks, with the layouts of its weights.
        """
        sequence, degree = self.sequence_parallel, self.degree
        rules = base_rules(plain, degree, tuple(layouts.items()), sequence)
        costs = self.costs or ByteCosts(degree, sequence)
        if self.steps and not trains:
            costs = self._mixed(plain, layouts, rules)
        return Search(block, degree, costs, layouts, rules, trains, sequence)

    def _mixed(
        self, plain: Graph, layouts: Mapping[str, Layout], rules: Mapping[str, Sharding]
    ) -> MixedCosts:
        """The costs of all steps that serve, each as a share of what the base alone takes."""
        weighed = []
        for costs in self.steps:
            search = Search(
                plain, self.degree, costs, layouts, rules, False, self.sequence_parallel
            )
            weighed.append((1 / search.plan().cost, costs))
        return MixedCosts(weighed)

    def searches(self, model: ModelGraph, given: Prepared, trains: bool) -> tuple[Search, ...]:
        """The searches for the bypass networks of each layer of a model."""
        places = zip(model.blocks, given.base_blocks(model), strict=True)
        return tuple(
            self.search(block, given.base.blocks[place], given.layouts[place], trains)
            for block, place in places
        )

    def _over_ranks(
        self, model: ModelGraph, given: Prepared, trains: bool
    ) -> tuple[ModelGraph, tuple[Search, ...], tuple[ParallelPlan, ...]]:
        searches = self.searches(model, given, trains)
        plans = tuple(search.plan() for search in searches)
        return self._typed(model, given, trains, searches, plans), searches, plans

    def _typed(
        self,
        model: ModelGraph,
        given: Prepared,
        trains: bool,
        searches: tuple[Search, ...],
        plans: tuple[ParallelPlan, ...],
    ) -> ModelGraph:
        """The model with layouts, by the plans of its blocks."""
        blocks = tuple(
            shard(search.graph, self.degree, found)
            for search, found in zip(searches, plans, strict=True)
        )
        ends = [self._end(model, given.base, trains, is_first=first) for first in (True, False)]
        return dataclasses.replace(model, prologue=ends[0], blocks=blocks, epilogue=ends[1])

    def _end(self, model: ModelGraph, base: ModelGraph, trains: bool, *, is_first: bool) -> Graph:
        graph = model.prologue if is_first else model.epilogue
        fixed, nodes = Constraints(), frozenset[str]()
        if self.sequence_parallel:
            fixed = _carried_layouts(model, is_first=is_first)
            carried = graph.outputs[: len(model.blocks[0].outputs)]
            nodes = token_sharded_nodes(graph, not trains, carried)
        layouts = _vocabulary(base, self.degree, is_first=is_first)
        fixed = dataclasses.replace(fixed, layouts=layouts)
        costs = ByteCosts(self.degree, self.sequence_parallel)
        plan = Planner(graph, self.degree, costs, trains, nodes).plan(fixed)
        return shard(graph, self.degree, plan)


@lru_cache(maxsize=64)
def base_rules(
    plain: Graph, degree: int, layouts: tuple[tuple[str, Layout], ...], sequence_parallel: bool
) -> Mapping[str, Sharding]:
    """The way of each node of a layer without bypass networks, of the fewest bytes between ranks.

    It is the same for all that is attached to the layer.
    """
    ends = token_sharded_ends(plain) if sequence_parallel else Constraints()
    fixed = dataclasses.replace(ends, layouts=dict(layouts))
    nodes = token_sharded_nodes(plain, many_adapters=False) if sequence_parallel else frozenset()
    costs = ByteCosts(degree, sequence_parallel)
    return Planner(plain, degree, costs, token_nodes=nodes).plan(fixed).rules


def _carried_layouts(model: ModelGraph, *, is_first: bool) -> Constraints:
    """Parts of the tokens of what the prologue hands the first layer, or the last the epilogue."""
    count = len(model.blocks[0].outputs)
    if is_first:
        types, outputs = model.prologue.types, model.prologue.outputs[:count]
        return Constraints(outputs={name: token_part(types[name]) for name in outputs})
    return Constraints(inputs={v.name: token_part(v.type) for v in model.epilogue.inputs[:count]})


def _vocabulary(base: ModelGraph, degree: int, *, is_first: bool) -> dict[str, Layout]:
    """Rows of the token embedding, or of the output's weight, on each rank, if equally many."""
    if is_first:
        graph, node = base.prologue, token_embedding(base.prologue)
        weights = [] if node is None else [node.inputs[0]]
    else:
        graph = base.epilogue
        weights = [node.inputs[1] for node in graph.nodes if node.op == "linear"]
    return {name: COLUMN for name in weights[-1:] if graph.types[name].features[0] % degree == 0}

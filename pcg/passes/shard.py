"""Parallel plan of a model over ranks, written as layouts into the types of its graphs.

The base's plan comes first and does not depend on adapters; bypass networks are sharded under it
(dependent parallelization, FlexLLM §5.1). A parallelization operator changes a value's layout; a
parameter read in two layouts becomes two parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter

import sympy

from pcg.errors import ParallelError, TypeCheckError, UnsupportedError
from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.layouts import REPLICATED, WHOLE, Layout, Sharding, token_part
from pcg.ir.program.program import ModelGraph, token_embedding
from pcg.options import MemoryBudget
from pcg.parallel.base_plan import COLUMN, base_plan, check_cuts, check_experts, routed_products
from pcg.parallel.costs.cost_model import RankCosts
from pcg.parallel.costs.layer_costs import ByteCosts, DeviceCosts, LayerCosts, MixedCosts
from pcg.parallel.parallel_plan import Constraints, NodePlan, ParallelPlan, Reshard, is_saved
from pcg.parallel.planner import Planner, routing_of
from pcg.parallel.search import Search
from pcg.parallel.sequence_parallel import token_sharded_ends, token_sharded_nodes
from pcg.passes.graphs.localize import Localize
from pcg.passes.graphs.pass_base import Pass
from pcg.passes.memory.joint import Joint, JointSearch
from pcg.passes.stages import Attached, Prepared, Sharded

# ------------------------------------------------------------------------------------------ sharder


_SUFFIX = {
    "collect": "collected",
    "combine": "joined",
    "dispatch": "dispatched",
    "gather": "gathered",
    "partition": "part",
    "place": "summand",
    "reduce": "sum",
    "replicate": "everywhere",
    "route": "routed",
    "scatter": "scattered",
    "take": "taken",
}


def shard(graph: Graph, degree: int, plan: ParallelPlan) -> Graph:
    """Return the graph with layouts in its types, and with the operators that change layouts."""
    return _Sharder(graph, degree, plan).run()


class _Sharder:
    def __init__(self, graph: Graph, degree: int, plan: ParallelPlan) -> None:
        self.graph = graph
        self.degree = degree
        self.plan = plan
        self.builder = Builder(graph.name)
        self.builder.reserved = graph.types
        self.versions: dict[str, dict[Layout, str]] = {}
        for value in graph.inputs:
            layout = plan.inputs.get(value.name, WHOLE)
            self.builder.input(value.name, layout.of(value.type, degree))
            self.versions[value.name] = {layout: value.name}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._node(node, self.plan.nodes[node.name])
        self._bring(self.plan.outputs)
        outputs = zip(self.graph.outputs, self.plan.outputs.rule.inputs, strict=True)
        return self.builder.build([self.versions[name][layout] for name, layout in outputs])

    def _node(self, node: Node, node_plan: NodePlan) -> None:
        for name, layout in node_plan.held:
            self._hold(self.graph.parameters_by_name[name], layout)
        self._bring(node_plan)
        inputs = []
        for name, layout in zip(node.inputs, node_plan.rule.inputs, strict=True):
            parameter = self.graph.parameters_by_name.get(name)
            if parameter is not None and parameter.role != "adapter":
                # Without a gradient, whole and replicated are equal.
                layout = REPLICATED if layout == WHOLE else layout
                if layout not in self.versions.get(name, {}):
                    self._hold(parameter, layout)
            inputs.append(self.versions[name][layout])
        outputs = []
        for value, layout in zip(node.outputs, node_plan.rule.outputs, strict=True):
            outputs.append(Value(value.name, layout.of(value.type, self.degree)))
            self.versions[value.name] = {layout: value.name}
        op = node_plan.rule.op or node.op
        self.builder.append(Node(op, tuple(inputs), tuple(outputs), node.attributes, node.scope))

    def _bring(self, node_plan: NodePlan) -> None:
        for name, reshards in node_plan.reshards:
            for reshard in reshards:
                if not is_saved(reshard.after) and reshard.after not in self.versions[name]:
                    self.versions[name][reshard.after] = self._transition(name, reshard)

    def _transition(self, name: str, reshard: Reshard) -> str:
        attributes = {"dim": reshard.dim} if reshard.dim else {}
        new_name = self.builder.fresh(f"{name}_{_SUFFIX[reshard.op]}")
        value = Value(new_name, reshard.after.of(self.graph.types[name], self.degree))
        maker = self.graph.producers.get(name)
        scope = maker.scope if maker else ""
        inputs = [self.versions[name][reshard.before]]
        if reshard.choices:
            routing = routing_of(self.graph, self.degree)
            assert routing is not None
            attributes["experts"] = routing.experts
            inputs.append(self.versions[routing.indices][REPLICATED])
        pairs = tuple(attributes.items())
        self.builder.append(Node(reshard.op, tuple(inputs), (value,), pairs, scope))
        return new_name

    def _hold(self, parameter: Parameter, layout: Layout) -> None:
        versions = self.versions.setdefault(parameter.name, {})
        name = parameter.name if not versions else self.builder.fresh(f"{parameter.name}_again")
        type_ = layout.of(parameter.type, self.degree)
        if parameter.role != "adapter" and layout == REPLICATED:
            type_ = parameter.type
        versions[layout] = self.builder.parameter(replace(parameter, value=Value(name, type_)))


# -------------------------------------------------------------------------------------------- shard


@dataclass(frozen=True)
class PlanBase(Pass[Attached, Prepared]):
    """Choose the layouts of the base's weights, from each layer's graph or from the user's plan.

    Ranks have a part of each expert, or of some of the experts, or some of them whole: by default
    what costs least, in seconds of a known device. Without one all cost the same, and ranks have
    parts of each, which are equal work.

    Attributes:
        degree: the number of ranks.
        styles: the user's plan, a style by module path; if empty, Megatron's styles are derived.
        ep: the number of parts of the experts, None to choose.
        costs: costs of a training step, if known.
    Raises:
        ParallelError: the degree divides neither heads nor products (the message names the degrees
            that do), `ep` is set without experts, or ranks cannot share a layer's experts.
    """

    name = "plan_base"
    degree: int
    styles: Mapping[str, str] = field(default_factory=dict)
    ep: int | None = None
    costs: LayerCosts | None = None

    def run(self, before: Attached) -> Prepared:
        blocks = before.base.blocks
        check_experts(blocks, self.ep)
        layouts = tuple(map(self._layouts, blocks))
        return Prepared(before.base, before.serving, before.training, layouts)

    def _layouts(self, block: Graph) -> Mapping[str, Layout]:
        experts = {node.inputs[2] for node in routed_products(block)}
        if self.styles or not experts:
            return base_plan(block, self.degree, self.styles)
        if self.ep in (1, self.degree):
            return base_plan(block, self.degree, ep=self.ep)
        planner = Planner(block, self.degree, self.costs or ByteCosts(self.degree))
        plans: list[tuple[float, Mapping[str, Layout]]] = []
        refusals: list[ParallelError] = []
        for ep in [self.ep] if self.ep else sympy.divisors(self.degree):
            try:
                plan = base_plan(block, self.degree, ep=ep)
                check_cuts(block, {name: plan[name] for name in experts}, self.degree)
                if self.costs is None and ep == 1:
                    return plan
                plans.append((planner.plan(Constraints(layouts=plan)).cost, plan))
            except ParallelError as error:
                refusals.append(error)
            except TypeCheckError as error:
                shared = f"ep={ep}: {self.degree // ep} ranks cannot share an expert: {error}"
                refusals.append(ParallelError(f"{shared}; use ep=1 or ep={self.degree}"))
        if not plans:
            raise refusals[0]
        return min(plans, key=itemgetter(0))[1]


@dataclass(frozen=True)
class Shard(Pass[Prepared, Sharded]):
    """Search for the layouts of bypass networks, and write all layouts into the graphs.

    Attributes:
        degree: the number of ranks.
        costs: costs of training bypass networks; bytes between ranks by default.
        steps: costs of a serving program's steps, all of which share a layout; `costs` by default.
        sequence_parallel: True if ranks hold parts of the tokens between the base's products.
        budget: the memory budget of a training step; under a binding number of bytes, layouts and
            saved values are chosen together (`pcg.passes.memory.joint`).
        rank_costs: the seconds of a rank's nodes, if known.
        is_lossy: True if values may be saved in codes (`pcg.passes.graphs.lossy`).
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
        chosen = served = self._over_ranks(before.serving, before, False)
        training, joint = None, None
        if before.training is not None:
            chosen = self._over_ranks(before.training, before, True)
            joint = self._joint(before, base, chosen[1])
            if joint is not None and joint.best is not joint.sequential:
                plans = joint.best.plans
                typed = self._typed(before.training, before, True, chosen[1], plans)
                chosen = (typed, chosen[1], plans)
            training = chosen[0]
        serving, searches, plans = served
        return Sharded(base, serving, training, before.layouts, *chosen, joint, searches, plans)

    def _joint(
        self, prepared: Prepared, base: ModelGraph, searches: tuple[Search, ...]
    ) -> Joint | None:
        """Choose layouts together with the saved values; None unless a number of bytes binds."""
        model = prepared.training
        if model is None or self.rank_costs is None or self.budget.size_bytes is None:
            return None
        localize = Localize(self.degree).run

        def local(plans: tuple[ParallelPlan, ...]) -> ModelGraph:
            return self._typed(model, prepared, True, searches, plans).map(localize)

        search = JointSearch(
            base.map(localize),
            prepared.base_blocks(model),
            searches,
            local=local,
            costs=self.rank_costs,
            budget=self.budget,
            is_lossy=self.is_lossy,
        )
        try:
            return search.find()
        except UnsupportedError:
            return None  # pcg cannot train the model

    def search(
        self, block: Graph, plain: Graph, layouts: Mapping[str, Layout], trains: bool = True
    ) -> Search:
        """Return the search for a layer's bypass networks, under the plan of the base's layer.

        `plain` is the layer without bypass networks, `layouts` has the layouts of its weights.
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
        """Return the costs of all serving steps, each relative to the base alone."""
        weighed = []
        for costs in self.steps:
            search = Search(
                plain, self.degree, costs, layouts, rules, False, self.sequence_parallel
            )
            weighed.append((1 / (search.plan().cost or 1.0), costs))  # an idle layer costs nothing
        return MixedCosts(weighed)

    def searches(self, model: ModelGraph, prepared: Prepared, trains: bool) -> tuple[Search, ...]:
        places = zip(model.blocks, prepared.base_blocks(model), strict=True)
        return tuple(
            self.search(block, prepared.base.blocks[place], prepared.layouts[place], trains)
            for block, place in places
        )

    def _over_ranks(
        self, model: ModelGraph, prepared: Prepared, trains: bool
    ) -> tuple[ModelGraph, tuple[Search, ...], tuple[ParallelPlan, ...]]:
        searches = self.searches(model, prepared, trains)
        plans = tuple(search.plan() for search in searches)
        return self._typed(model, prepared, trains, searches, plans), searches, plans

    def _typed(
        self,
        model: ModelGraph,
        prepared: Prepared,
        trains: bool,
        searches: tuple[Search, ...],
        plans: tuple[ParallelPlan, ...],
    ) -> ModelGraph:
        blocks = tuple(
            shard(search.graph, self.degree, plan)
            for search, plan in zip(searches, plans, strict=True)
        )
        ends = [self._end(model, prepared.base, trains, is_first=first) for first in (True, False)]
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
    """Return the cheapest rule of each node of a base layer, by bytes between ranks.

    The result is cached, as all attachments share it.
    """
    ends = token_sharded_ends(plain) if sequence_parallel else Constraints()
    fixed = dataclasses.replace(ends, layouts=dict(layouts))
    nodes = token_sharded_nodes(plain, many_adapters=False) if sequence_parallel else frozenset()
    costs = ByteCosts(degree, sequence_parallel)
    return Planner(plain, degree, costs, token_nodes=nodes).plan(fixed).rules


def _carried_layouts(model: ModelGraph, *, is_first: bool) -> Constraints:
    """Return token shards for the prologue's carried outputs, or the epilogue's inputs."""
    count = len(model.blocks[0].outputs)
    if is_first:
        types, outputs = model.prologue.types, model.prologue.outputs[:count]
        return Constraints(outputs={name: token_part(types[name]) for name in outputs})
    return Constraints(inputs={v.name: token_part(v.type) for v in model.epilogue.inputs[:count]})


def _vocabulary(base: ModelGraph, degree: int, *, is_first: bool) -> dict[str, Layout]:
    """Return row shards of the token embedding or the output weight, if ranks divide the rows."""
    if is_first:
        graph, node = base.prologue, token_embedding(base.prologue)
        weights = [] if node is None else [node.inputs[0]]
    else:
        graph = base.epilogue
        weights = [node.inputs[1] for node in graph.nodes if node.op == "linear"]
    return {name: COLUMN for name in weights[-1:] if graph.types[name].features[0] % degree == 0}

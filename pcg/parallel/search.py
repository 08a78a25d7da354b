"""Search for the parallelization of bypass networks under a fixed parallelization of the base.

The base's nodes run as without adapters; all bypass networks together are planned at the least cost
(`pcg.parallel.planner`), so that several sites share a gathered value. A candidate of a site holds
its weights in given layouts, with all other sites as chosen and the rest planned at the least cost.
The cost of a bypass network is the layer with the network less the layer without it, where the
network's input to the sum replaces the sum, and all other nodes run equally.

The planner counts messages separately; a plan's cost is then counted with neighbouring messages
coalesced. The search therefore also plans with some kinds of messages free of startup cost, as if
always coalesced, and replaces the planner's choices by these at a site, at the sites of an input,
or everywhere, as long as the cost decreases.

Backward needs some values that only a site's nodes read, such as s = x Aᵀ, in the layout that a
node's gradient reads. Such a value is saved, gathered again from saved parts, or recomputed:

    price(v, l) = min over layouts m   λ bytes(v, m) + messages(m → l)
                  min over rules w     seconds(w) + messages(w's layout → l)

λ is the price of memory at a budget, in seconds per byte. The inputs of the recomputed node are
free in this price, so a plan's least cost with these prices is a lower bound of any choice of saved
and recomputed values: the cut of the layer's graph (`pcg.passes.memory.save_problem`) has room for
these flows and those of the base's values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pcg.errors import TypeCheckError
from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import REPLICATED, WHOLE, Layout, Sharding, partitioned
from pcg.parallel.coalescing import Message, plan_messages
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.costs.work import size_bytes
from pcg.parallel.parallel_plan import Constraints, Cost, ParallelPlan
from pcg.parallel.planner import Planner
from pcg.parallel.sequence_parallel import gradient_reads, token_sharded_ends, token_sharded_nodes
from pcg.parallel.strategy_names import BypassSite, bypass_sites, strategy_name

# -------------------------------------------------------------------------------------- kept values


class KeptValues:
    """The values of a layer's bypass networks that backward reads."""

    def __init__(self, planner: Planner, sites: Sequence[BypassSite]) -> None:
        self._planner = planner
        self._costs = planner.costs
        self._nodes = {node.name: node for node in planner.graph.nodes}
        self._makers = {name: node.name for name, node in planner.graph.producers.items()}
        site_nodes = {name for site in sites for name in site.nodes}
        private = _private(planner.graph, site_nodes)
        self._reads: dict[str, list[tuple[int, str]]] = {}
        known: set[str] = set()
        for name in (name for name in self._nodes if name in site_nodes):
            node = self._nodes[name]
            for place in sorted(gradient_reads(planner.graph, node, planner.active)[0]):
                value = node.inputs[place]
                if value in private and value not in known:
                    known.add(value)
                    self._reads.setdefault(name, []).append((place, value))

    def size_bytes(self, plan: ParallelPlan, site: BypassSite) -> int:
        """Return the bytes of a site's values on a rank, if none is recomputed."""
        return sum(
            self._local_bytes(value, plan.nodes[name].rule.inputs[place])
            for name in site.nodes
            for place, value in self._reads.get(name, ())
        )

    def planner(self, byte_seconds: float) -> Planner:
        """Return the planner with the values' least price, at a price per byte in seconds."""
        prices = {
            name: {rule: self._price(name, rule, byte_seconds) for rule in self._planner.ways(name)}
            for name in self._reads
        }
        return self._planner.with_prices(prices)

    def _price(self, name: str, rule: Sharding, byte_seconds: float) -> float:
        return sum(
            self._least(value, rule.inputs[place], byte_seconds)
            for place, value in self._reads[name]
        )

    def _least(self, value: str, layout: Layout, byte_seconds: float) -> float:
        """Return the least seconds to have a value in a layout, with its node's inputs for free."""
        paths, type_ = self._planner.paths, self._planner.graph.types[value]
        costs = []
        for other in (layout, *paths.parts(type_)):
            sent = paths.path(type_, False, frozenset([other]), layout)
            if sent is not None:
                costs.append(byte_seconds * self._local_bytes(value, other) + sent[0])
        for rule, seconds in self.seconds(self._makers[value]).items():
            sent = paths.path(type_, False, frozenset([rule.outputs[0]]), layout)
            if sent is not None:
                costs.append(seconds + sent[0])
        return min(costs)

    def seconds(self, name: str) -> dict[Sharding, float]:
        node, graph = self._nodes[name], self._planner.graph
        nothing = (False,) * len(node.inputs)
        ways = self._planner.ways(name)
        return {rule: self._costs.node(node, graph, rule, nothing) for rule in ways}

    def _local_bytes(self, value: str, layout: Layout) -> int:
        whole = size_bytes(self._planner.graph.types[value], self._costs.tokens)
        return -(-whole // math.prod(count for _, count in layout.cuts(self._planner.degree)))


def _private(graph: Graph, nodes: set[str]) -> set[str]:
    """Return token-wise values of these nodes that no other node reads."""
    outputs = {value.name for node in _those(graph, nodes) for value in node.outputs}
    inner = {name for node in _those(graph, nodes) for name in node.inputs}
    outer = {name for node in graph.nodes if node.name not in nodes for name in node.inputs}
    private = (outputs & inner) - outer - set(graph.outputs)
    return {name for name in private if graph.types[name].is_token_wise}


def _those(graph: Graph, names: set[str]) -> Iterator[Node]:
    return (node for node in graph.nodes if node.name in names)


# --------------------------------------------------------------------------------------- plan costs


class PlanCosts:
    """The costs of a layer's plans under constraints."""

    def __init__(self, planner: Planner, constraints: Constraints) -> None:
        self.planner = planner
        self._given = constraints
        self._without: dict[object, tuple[ParallelPlan, Cost]] = {}
        self._planners: dict[frozenset[str], Planner] = {}

    def of(self, plan: ParallelPlan) -> Cost:
        return _cost(self.planner, plan)

    def without(self, plan: ParallelPlan, nodes: Collection[str]) -> Cost:
        """Return the cost of a plan without the bypass networks of these nodes."""
        left_out = frozenset(nodes)
        known = self._without.get((id(plan), left_out))
        if known is None or known[0] is not plan:
            known = self._without[id(plan), left_out] = (plan, self._less(plan, left_out))
        return known[1]

    def _less(self, plan: ParallelPlan, nodes: frozenset[str]) -> Cost:
        if nodes not in self._planners:
            self._planners[nodes] = self.planner.of(_without(self.planner.graph, nodes))
        planner = self._planners[nodes]
        constraints, graph = self._given, planner.graph
        rules = {name: rule for name, rule in plan.rules.items() if name not in nodes}
        held = {name: at for name, at in plan.held.items() if name in graph.parameters_by_name}
        ends = zip(graph.outputs, self.planner.graph.outputs, strict=True)
        outputs = {
            here: constraints.outputs[whole_name]
            for here, whole_name in ends
            if whole_name in constraints.outputs
        }
        layouts = {**constraints.layouts, **held}
        fixed = replace(constraints, layouts=layouts, rules=rules, outputs=outputs)
        return _cost(planner, planner.plan(fixed))


def _cost(planner: Planner, plan: ParallelPlan) -> Cost:
    costs = planner.costs
    forward, backward = plan_messages(planner.graph, plan, planner.degree, planner.active)
    alone = sum(
        planner.paths.send(reshard, planner.graph.types[name], name in planner.active)
        for node_plan in (*plan.nodes.values(), plan.outputs)
        for name, reshards in node_plan.reshards
        for reshard in reshards
    )
    together = sum(costs.send(message.kind, *message.types) for message in (*forward, *backward))

    def sent(messages: Sequence[Message]) -> int:
        return sum(costs.bytes_sent(message.kind, *message.types) for message in messages)

    step_bytes = sum(node_plan.step_bytes for node_plan in plan.nodes.values())
    bytes_ = (sent(forward), sent(backward), step_bytes)
    return Cost(plan.cost - alone + together, *bytes_, len(forward), len(backward))


def _without(graph: Graph, nodes: Collection[str]) -> Graph:
    """Drop bypass networks: the value that each adds to replaces its result."""
    names: dict[str, str] = {}
    remaining = []
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        if node.name in nodes:
            names |= {value.name: inputs[0] for value in node.outputs}
        else:
            remaining.append(replace(node, inputs=inputs))
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return graph.replace(nodes=tuple(remaining), outputs=outputs).without_dead_code()


# ------------------------------------------------------------------------------------------- search


_MOST_LISTED = 64
"""Maximum number of listed candidates of a site; beyond, those that differ in a single weight."""
_FREE = (
    frozenset({("forward", "all_reduce")}),
    frozenset({("backward", "all_reduce")}),
    frozenset({("forward", "all_reduce"), ("backward", "all_reduce")}),
    frozenset(itertools.product(("forward", "backward"), ("all_gather", "all_reduce"))),
)
"""Messages that may be coalesced: sums, as the base has some in both directions; then all."""
_Holding = tuple[Layout, bool]
"""The layout in which ranks hold a weight, and whether its readers gather it."""


@dataclass(frozen=True)
class Candidate:
    """A candidate parallelization of a site.

    Attributes:
        strategy: the name of its algorithm; see `strategy_name`.
        gathered: weights that their readers gather.
        added: its cost, added to the layer's.
        kept_bytes: bytes on a rank of the site's values that backward reads.
    """

    strategy: str
    layouts: Mapping[str, Layout]
    gathered: frozenset[str]
    added: Cost
    kept_bytes: int

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(sorted(self.layouts.items(), key=str)), self.gathered


@dataclass(frozen=True)
class SiteChoice:
    """A site's candidates, cheapest first, and the chosen candidate."""

    site: BypassSite
    chosen: Candidate
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class SearchResult:
    """The cheapest plan of a layer, and its sites with their candidates."""

    plan: ParallelPlan
    sites: tuple[SiteChoice, ...]


class Search:
    """The search over a layer; its cached costs serve all plans.

    Args:
        graph: the layer's graph with bypass networks, of whole tensors.
        layouts: layouts of the base's weights.
        base: rules of the base's nodes, by name.
        trains: True for a training layer: it has a backward, and ranks may gather adapter weights.
            The weights of a serving batch's many adapters are not gathered.
        sequence_parallel: True if ranks hold token shards between the base's products.
    """

    def __init__(
        self,
        graph: Graph,
        degree: int,
        costs: LayerCosts,
        layouts: Mapping[str, Layout],
        base: Mapping[str, Sharding],
        trains: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        self.graph = graph
        self.base = {node.name: base[node.name] for node in graph.nodes if node.name in base}
        # A parameter whose parts ranks share is sharded by rows, as ranks hold no more.
        shared = (p for p in graph.parameters if p.copies > 1)
        self.fixed = {p.name: partitioned(-len(p.type.dims)) for p in shared}
        self.layouts = layouts = {**layouts, **self.fixed}
        nodes = token_sharded_nodes(graph, not trains) if sequence_parallel else frozenset()
        self.planner = Planner(graph, degree, costs, trains, nodes)
        self.sites = bypass_sites(graph, self.base)
        weights = frozenset(name for site in self.sites for name in site.weights)
        self._direct = frozenset[str]() if trains else weights
        ends = token_sharded_ends(graph) if sequence_parallel else Constraints()
        self._given = replace(ends, layouts=layouts, rules=self.base, direct=self._direct)
        self.costs = PlanCosts(self.planner, self._given)

    # ---------------------------------------------------------------------------- the best plan

    def plan(self) -> ParallelPlan:
        """Return the cheapest plan of the search, with neighbouring messages coalesced."""
        return self._cheapest

    @cached_property
    def _cheapest(self) -> ParallelPlan:
        best = self.planner.plan(self._given)
        if not self.sites:
            return best
        others = [self.planner.where_free(free).plan(self._given) for free in _FREE]
        sets = [self.sites, *self._of_one_input(), *((site,) for site in self.sites)]
        cost, is_better = self.costs.of(best).value, True
        while is_better:
            is_better = False
            for other, some in itertools.product(others, sets):
                plan = self._with(best, other, some)
                if plan is not None and (now := self.costs.of(plan).value) < cost * (1 - 1e-9):
                    best, cost, is_better = plan, now, True
        return best

    def proposals(self, byte_seconds: float) -> Iterator[ParallelPlan]:
        """Yield the cheapest plans at a price per byte of the sites' values that backward reads."""
        priced = self.kept.planner(byte_seconds)
        for planner in (priced, *map(priced.where_free, _FREE)):
            plan = self._with(self._cheapest, planner.plan(self._given), self.sites)
            if plan is not None:
                yield plan

    def least_cost(self, byte_seconds: float) -> float:
        """Return the least cost of a plan at such a price, without coalescing of messages."""
        return self.kept.planner(byte_seconds).plan(self._given).cost

    @cached_property
    def kept(self) -> KeptValues:
        return KeptValues(self.planner, self.sites)

    def at(self, costs: LayerCosts, plan: ParallelPlan) -> Cost:
        """Return the cost of a plan by other costs, such as those of another step size."""
        layouts = {**self.layouts, **plan.held}
        planner = self.planner.by(costs)
        fixed = replace(self._given, layouts=layouts, rules=plan.rules)
        return PlanCosts(planner, fixed).of(planner.plan(fixed))

    def _of_one_input(self) -> list[tuple[BypassSite, ...]]:
        """Return groups of sites that read the same value of the base."""
        inputs = {node.name: node.inputs[0] for node in self.graph.nodes}
        groups: dict[str, list[BypassSite]] = {}
        for site in self.sites:
            groups.setdefault(inputs[site.nodes[0]], []).append(site)
        return [tuple(some) for some in groups.values() if 1 < len(some) < len(self.sites)]

    def _with(
        self, best: ParallelPlan, other: ParallelPlan, some: Iterable[BypassSite]
    ) -> ParallelPlan | None:
        """Return `best` with some sites as in `other`; None if equal to `best` or impossible."""
        rules, held = best.rules, best.held
        for site in some:
            rules |= {name: other.nodes[name].rule for name in site.nodes}
            held |= {name: other.held[name] for name in site.weights}
        if (rules, held) == (best.rules, best.held):
            return None
        fixed = replace(self._given, layouts={**self.layouts, **held}, rules=rules)
        try:
            return self.planner.plan(fixed)
        except TypeCheckError:
            return None

    # ------------------------------------------------------------------------------ other plans

    def hold(
        self, layouts: Mapping[str, Layout], gathered: frozenset[str] = frozenset()
    ) -> ParallelPlan:
        """Return the cheapest plan with adapters' weights in the given layouts, others free.

        Readers gather the weights in `gathered`. TypeCheckError: no rule takes the layouts.
        """
        return self.planner.plan(self.holding(layouts, gathered))

    def holding(
        self, layouts: Mapping[str, Layout], gathered: frozenset[str] = frozenset()
    ) -> Constraints:
        return self._fixed({}, layouts, gathered, self.base)

    def force(
        self,
        best: ParallelPlan,
        site: BypassSite,
        layouts: Mapping[str, Layout],
        gathered: frozenset[str] = frozenset(),
    ) -> ParallelPlan:
        """Return the cheapest plan with a site's weights in layouts, and other sites as in `best`.

        Raises:
            TypeCheckError: no rule takes the layouts.
        """
        rules = {name: rule for name, rule in best.rules.items() if name not in site.nodes}
        return self.planner.plan(self._fixed(best.held, layouts, gathered, rules))

    def _fixed(
        self,
        others: Mapping[str, Layout],
        layouts: Mapping[str, Layout],
        gathered: frozenset[str],
        rules: Mapping[str, Sharding],
    ) -> Constraints:
        sharded = frozenset(name for name, layout in layouts.items() if layout.dim)
        return replace(
            self._given,
            layouts={**self.layouts, **others, **layouts},
            rules=rules,
            gathered=gathered,
            direct=(sharded - gathered) | self._direct,
        )

    # ------------------------------------------------------------------------------- candidates

    def find(self, plan: ParallelPlan | None = None) -> SearchResult:
        """Return a plan, by default the cheapest, with each site's candidates."""
        best = self.plan() if plan is None else plan
        return SearchResult(best, tuple(self._choice(best, site) for site in self.sites))

    def strategy(self, plan: ParallelPlan, site: BypassSite) -> str:
        return strategy_name(self.graph, site, plan, self._gathered(plan, site))

    @staticmethod
    def _gathered(plan: ParallelPlan, site: BypassSite) -> frozenset[str]:
        reshards = [some for node in site.nodes for some in plan.nodes[node].reshards]
        combined = {
            name for name, some in reshards if any(reshard.op == "combine" for reshard in some)
        }
        return frozenset(n for n in site.weights if n in combined and plan.held[n].dim)

    def chosen(self, best: ParallelPlan, site: BypassSite) -> Candidate:
        return self._candidate(best, best, site, self._gathered(best, site))

    def _choice(self, best: ParallelPlan, site: BypassSite) -> SiteChoice:
        chosen = self.chosen(best, site)
        candidates = {chosen.key: chosen}
        for layouts, gathered in self.ways(site, chosen):
            try:
                plan = self.force(best, site, layouts, gathered)
            except TypeCheckError:
                continue  # these layouts are impossible
            candidate = self._candidate(plan, best, site, gathered)
            candidates.setdefault(candidate.key, candidate)
        ordered = sorted(candidates.values(), key=lambda candidate: candidate.added.value)
        return SiteChoice(site, chosen, tuple(ordered))

    def _candidate(
        self, plan: ParallelPlan, best: ParallelPlan, site: BypassSite, gathered: frozenset[str]
    ) -> Candidate:
        layouts = {name: plan.held[name] for name in site.weights}
        added = self.costs.of(plan) - self.costs.without(best, site.nodes)
        name = strategy_name(self.graph, site, plan, gathered)
        return Candidate(name, layouts, gathered, added, self.kept.size_bytes(plan, site))

    def ways(
        self, site: BypassSite, chosen: Candidate
    ) -> Iterator[tuple[Mapping[str, Layout], frozenset[str]]]:
        """Yield layouts of a site's weights, with the weights that readers gather."""
        options = {name: self._options(name) for name in site.weights}
        ways: Iterable[tuple[_Holding, ...]] = itertools.product(*options.values())
        if math.prod(map(len, options.values())) > _MOST_LISTED:
            ways = self._neighbours(options, chosen)
        for way in ways:
            named = dict(zip(options, way, strict=True))
            gathered = frozenset(name for name, (_, is_gathered) in named.items() if is_gathered)
            yield {name: layout for name, (layout, _) in named.items()}, gathered

    def _options(self, name: str) -> list[_Holding]:
        if name in self.fixed:
            return [(self.fixed[name], False)]
        parts = self.planner.paths.parts(self.graph.types[name])
        sharded = itertools.product(parts, (False, True))
        return [(WHOLE, False), (REPLICATED, False), *sharded]

    def _neighbours(
        self, options: Mapping[str, Sequence[_Holding]], chosen: Candidate
    ) -> Iterator[tuple[_Holding, ...]]:
        """Yield equal layouts of all weights, and the chosen ones with one weight changed."""
        now = [(chosen.layouts[name], name in chosen.gathered) for name in options]
        for same in (WHOLE, REPLICATED):
            yield tuple((self.fixed.get(name, same), False) for name in options)
        for place, name in enumerate(options):
            for other in options[name]:
                yield (*now[:place], other, *now[place + 1 :])

"""Search how to parallelize bypass networks under a base whose parallelization is fixed.

A site is a bypass network: the nodes that an adapter adds at one place of a layer, with the weights
that they read. The base's nodes run as they do without adapters; between them all sites together
are planned at the least cost (`pcg.parallel.planner`), so that what one site gathers another reads.
A candidate of a site holds its weights in given layouts, with everything else about it planned at
the least cost and all other sites as chosen.

The planner takes each message by itself; what a plan costs is then counted with neighbours in one
message (`pcg.parallel.coalescing`). So more plans are made for which some kinds of messages cost
nothing to start, as if they always met another, and from the planner's own the search takes over
what these do at a site, at those of one input, or at all, as long as that costs less.

Names of LoRA's candidates, by the layouts of A and B: FlexLLM's four (v1 figure 5, v2 figure 4),
Punica's (§7), S-LoRA's (§6), weights gathered where they are read (as fully sharded data
parallelism does), and copies of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx

from pcg.errors import TypeCheckError
from pcg.ir.graph import Graph
from pcg.ir.layouts import REPLICATED, WHOLE, Layout, Sharding
from pcg.parallel.base_plan import COLUMN, ROW
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.parallel_plan import Constraints, Cost, ParallelPlan
from pcg.parallel.plan_costs import PlanCosts
from pcg.parallel.planner import Planner
from pcg.parallel.sequence_parallel import token_sharded_ends, token_sharded_nodes

_PARTED_MOST = 64
"""Candidates of a site of which all are listed; of more, those that differ in one weight."""

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
_FREE = (
    frozenset({("forward", "all_reduce")}),
    frozenset({("backward", "all_reduce")}),
    frozenset({("forward", "all_reduce"), ("backward", "all_reduce")}),
    frozenset(itertools.product(("forward", "backward"), ("all_gather", "all_reduce"))),
)
"""Messages that may meet others: sums meet the base's, which has some each way; then all."""
_GATHERED = "fully sharded, weights gathered"


@dataclass(frozen=True)
class Site:
    """One bypass network of a layer.

    Attributes:
        name: path of the module that it stands at.
        nodes: names, in the order of the graph.
        weights: names of the adapter's weights that they read.
        is_row: whether what it adds to is a sum over ranks; None where that is whole.
    """

    name: str
    nodes: tuple[str, ...]
    weights: tuple[str, ...]
    is_row: bool | None


@dataclass(frozen=True)
class Candidate:
    """One way to parallelize a site.

    Attributes:
        strategy: what it is called, or the layouts of its weights.
        layouts: of its weights, by name.
        gathered: weights that are gathered where they are read.
        bill: what it adds to the layer.
        layer: what the layer costs with it.
    """

    strategy: str
    layouts: Mapping[str, Layout]
    gathered: frozenset[str]
    bill: Cost
    layer: Cost

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(sorted(self.layouts.items(), key=str)), self.gathered


@dataclass(frozen=True)
class SiteChoice:
    """A site's candidates, cheapest first, and the one that is chosen."""

    site: Site
    chosen: Candidate
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class SearchResult:
    """What a search found for a layer.

    Attributes:
        plan: of all nodes.
        sites: with their candidates.
    """

    plan: ParallelPlan
    sites: tuple[SiteChoice, ...]


def sites(graph: Graph, base: Mapping[str, Sharding]) -> tuple[Site, ...]:
    """The bypass networks of a layer.

    Args:
        graph: of the layer, with whole tensors.
        base: ways of the base's nodes, by name.
    """
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
            is_row = None if not outputs else any(o.state.value == "+" for o in outputs)
            if is_row is False and not any(o.dim for o in outputs):
                is_row = None
            names = tuple(node.name for node in nodes)
            found.append(Site(at.scope or at.name, names, tuple(weights), is_row))
    return tuple(found)


class Search:
    """The search over one layer; what it learns of costs serves all its plans.

    Args:
        graph: of the layer with bypass networks, of whole tensors.
        degree: number of ranks.
        costs: what ranks pay.
        layouts: of the base's weights.
        base: ways of the base's nodes, by name.
        trains: whether there is a backward, and each adapter's weight is one tensor, which may be
            gathered where it is read; those of a batch's many adapters may not.
        parts_tokens: whether ranks hold parts of the tokens between the base's products.
    """

    def __init__(
        self,
        graph: Graph,
        degree: int,
        costs: LayerCosts,
        layouts: Mapping[str, Layout],
        base: Mapping[str, Sharding],
        trains: bool = True,
        parts_tokens: bool = False,
    ) -> None:
        self.graph = graph
        self.base = {node.name: base[node.name] for node in graph.nodes if node.name in base}
        self.layouts = layouts
        nodes = token_sharded_nodes(graph, not trains) if parts_tokens else frozenset()
        self.planner = Planner(graph, degree, costs, trains, nodes)
        self._best: ParallelPlan | None = None
        self.sites = sites(graph, self.base)
        weights = {name for site in self.sites for name in site.weights}
        self._direct = frozenset() if trains else frozenset(weights)
        ends = token_sharded_ends(graph) if parts_tokens else Constraints()
        self._given = replace(ends, layouts=layouts, rules=self.base, direct=self._direct)
        self.bill = PlanCosts(self.planner, self._given)

    def plan(self) -> ParallelPlan:
        """The cheapest plan that is found, with neighbours in one message."""
        if self._best is None:
            self._best = self._cheapest()
        return self._best

    def _cheapest(self) -> ParallelPlan:
        best = self.planner.plan(self._given)
        others = [self.planner.where_free(free).plan(self._given) for free in _FREE]
        sets = [self.sites, *self._of_one_input(), *((site,) for site in self.sites)]
        cost, is_better = self.bill.of(best).cost, True
        while is_better:
            is_better = False
            for other, some in itertools.product(others, sets):
                plan = self._with(best, other, some)
                if plan is not None and (now := self.bill.of(plan).cost) < cost * (1 - 1e-9):
                    best, cost, is_better = plan, now, True
        return best

    def _of_one_input(self) -> list[tuple[Site, ...]]:
        """Sites that read the same value of the base's, where they are several."""
        inputs = {node.name: node.inputs[0] for node in self.graph.nodes}
        found: dict[str, list[Site]] = {}
        for site in self.sites:
            found.setdefault(inputs[site.nodes[0]], []).append(site)
        return [tuple(some) for some in found.values() if 1 < len(some) < len(self.sites)]

    def _with(
        self, best: ParallelPlan, other: ParallelPlan, some: Iterable[Site]
    ) -> ParallelPlan | None:
        """The one plan with some sites as in the other; None where it is so, or cannot be."""
        now = {name: choice.rule for name, choice in best.choices.items()}
        rules, held = dict(now), best.held
        for site in some:
            rules |= {name: other.choices[name].rule for name in site.nodes}
            held |= {name: other.held[name] for name in site.weights}
        if (rules, held) == (now, best.held):
            return None
        fixed = replace(self._given, layouts={**self.layouts, **held}, rules=rules)
        try:
            return self.planner.plan(fixed)
        except TypeCheckError:
            return None

    def hold(
        self, layouts: Mapping[str, Layout], gathered: frozenset[str] = frozenset()
    ) -> ParallelPlan:
        """The cheapest plan that holds adapters' weights in given layouts.

        Args:
            layouts: of weights by name; those that are not named are free.
            gathered: of them, those that are gathered where they are read.
        Raises:
            TypeCheckError: there is no way to run it so.
        """
        direct = self._direct_of(layouts, gathered)
        held = {**self.layouts, **layouts}
        fixed = replace(self._given, layouts=held, gathered=gathered, direct=direct)
        return self.planner.plan(fixed)

    def _direct_of(self, layouts: Mapping[str, Layout], gathered: frozenset[str]) -> frozenset[str]:
        """Weights that are read as they are held."""
        parted = frozenset(name for name, layout in layouts.items() if layout.dim)
        return (parted - gathered) | self._direct

    def find(self) -> SearchResult:
        """The cheapest plan, and each site's candidates beside it."""
        best = self.plan()
        return SearchResult(best, tuple(self._choices(best, site) for site in self.sites))

    def candidate(self, plan: ParallelPlan, site: Site) -> Candidate:
        """What a plan does at a site, with what that adds to the layer."""
        return self._candidate(plan, plan, site, self._gathered(plan, site))

    def strategy(self, plan: ParallelPlan, site: Site) -> str:
        """What a plan does at a site is called."""
        layouts = {name: plan.held[name] for name in site.weights}
        return strategy_name(site, layouts, self._gathered(plan, site))

    @staticmethod
    def _gathered(plan: ParallelPlan, site: Site) -> frozenset[str]:
        """Weights that the site's nodes gather."""
        combined = {
            name
            for node in site.nodes
            for name, steps in plan.choices[node].steps
            if any(step.op == "combine" for step in steps)
        }
        return frozenset(n for n in site.weights if n in combined and plan.held[n].dim)

    def _choices(self, best: ParallelPlan, site: Site) -> SiteChoice:
        chosen = self.candidate(best, site)
        found = {chosen.key: chosen}
        for held, gathers in self._ways(site, chosen):
            try:
                plan = self.force(best, site, held, gathers)
            except TypeCheckError:
                continue  # no way to run it so
            candidate = self._candidate(plan, best, site, gathers)
            found.setdefault(candidate.key, candidate)
        ordered = sorted(found.values(), key=lambda candidate: candidate.bill.cost)
        return SiteChoice(site, chosen, tuple(ordered))

    def _ways(
        self, site: Site, chosen: Candidate
    ) -> Iterator[tuple[Mapping[str, Layout], frozenset[str]]]:
        """Layouts of a site's weights, and which of them are gathered where they are read."""
        options = {name: list(self._options(name)) for name in site.weights}
        count = 1
        for of_one in options.values():
            count *= len(of_one)
        ways: Iterator[tuple[tuple[Layout, bool], ...]]
        if count <= _PARTED_MOST:
            ways = itertools.product(*options.values())
        else:
            ways = self._neighbours(options, chosen)
        for way in ways:
            layouts = {name: layout for name, (layout, _) in zip(options, way, strict=True)}
            yield (
                layouts,
                frozenset(
                    n for n, (_, is_gathered) in zip(options, way, strict=True) if is_gathered
                ),
            )

    def _options(self, name: str) -> Iterator[tuple[Layout, bool]]:
        type_ = self.graph.types[name]
        yield WHOLE, False
        yield REPLICATED, False
        for part in self.planner.parts(type_):
            yield from ((part, False), (part, True))

    @staticmethod
    def _neighbours(
        options: Mapping[str, Sequence[tuple[Layout, bool]]], chosen: Candidate
    ) -> Iterator[tuple[tuple[Layout, bool], ...]]:
        """All weights held alike, and what differs from the chosen in one weight."""
        now = [(chosen.layouts[name], name in chosen.gathered) for name in options]
        for same in (WHOLE, REPLICATED):
            yield tuple((same, False) for _ in options)
        for place, name in enumerate(options):
            for other in options[name]:
                yield (*now[:place], other, *now[place + 1 :])

    def force(
        self,
        best: ParallelPlan,
        site: Site,
        layouts: Mapping[str, Layout],
        gathered: frozenset[str] = frozenset(),
    ) -> ParallelPlan:
        """A plan with one site's weights held in given layouts, and all other sites as they were.

        Args:
            best: the plan of all others.
            site: of this layer.
            layouts: of the site's weights by name.
            gathered: of them, those that are gathered where they are read.
        Raises:
            TypeCheckError: there is no way to run it so.
        """
        rules = {
            name: choice.rule for name, choice in best.choices.items() if name not in site.nodes
        }
        others = {name: layout for name, layout in best.held.items() if name not in layouts}
        direct = self._direct_of(layouts, gathered)
        held = {**self.layouts, **others, **layouts}
        fixed = replace(self._given, layouts=held, rules=rules, gathered=gathered, direct=direct)
        return self.planner.plan(fixed)

    def _candidate(
        self, plan: ParallelPlan, best: ParallelPlan, site: Site, gathered: frozenset[str]
    ) -> Candidate:
        layouts = {name: plan.held[name] for name in site.weights}
        layer = self.bill.of(plan)
        bill = layer - self.bill.without(best, site.nodes)
        return Candidate(strategy_name(site, layouts, gathered), layouts, gathered, bill, layer)


def strategy_name(site: Site, layouts: Mapping[str, Layout], gathered: frozenset[str]) -> str:
    """What a candidate is called: by the papers where it is theirs, else by its layouts."""
    held = tuple(layouts.values())
    ends = [name.rpartition(".")[2] for name in layouts]
    if ends == ["lora_A", "lora_B"]:
        if len(gathered) == len(layouts) and set(held) == {COLUMN}:
            return _GATHERED
        names = _OF_ROW if site.is_row else _OF_COLUMN
        if site.is_row is not None and not gathered and held in names:
            return names[held]
    if len(set(held)) == 1 and not gathered and held[0] in (WHOLE, REPLICATED):
        return "whole" if held[0] == WHOLE else "fully replicated"
    return ", ".join(
        f"{end} {'gathered ' if name in gathered else ''}{layout}"
        for end, (name, layout) in zip(ends, layouts.items(), strict=True)
    )

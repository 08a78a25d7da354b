"""Joint choice of layouts and saved values: the least time of the layers within a memory limit.

    minimise    Σ layers  plan(a) + recompute(a, c)         seconds: compute, messages, recompute
    such that   Σ layers  saved(a, c)                       <= limit

a are the layouts of a block's adapters, c the saved values of each of its layers. At fixed layouts
c is a minimum cut (`pcg.passes.memory.save_problem`), spread over the layers. Over the layouts the
search is a branch and bound, with the bound, at a rate of λ seconds a byte,

    Σ blocks  priced plan(a, λ)  +  Σ layers  base cut(λ)  -  λ limit

The planner's dynamic program computes the first term for partially fixed layouts, where the values
of bypass networks that backward reads have their least price (`pcg.parallel.search`). The second
term is the cut of the layer without bypass networks, a lower bound: a cut with them has room for
both flows. Once the bound reaches the best step, no other layouts are better. Values saved in codes
have fewer bytes than these prices assume; the bound is then that of the plans, at λ = 0. The
planner counts messages separately; of all plans with a computed cut, the result is the fastest with
neighbouring messages coalesced.

For the base cut, the layer is differentiated by its inputs, and by the values that the networks add
to. Backward also reads the base values that the networks' gradients read, in at least a rank's
part; recomputing a value that a network adds to repeats the sum, at its least time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pcg.errors import TypeCheckError
from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph
from pcg.ir.layouts import Layout
from pcg.ir.program.program import ModelGraph
from pcg.options import MemoryBudget
from pcg.parallel.costs.cost_model import PICOSECOND, RankCosts
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search
from pcg.parallel.sequence_parallel import gradient_reads
from pcg.passes.graphs.differentiate import Differentiate, Differentiated, LayerKind, layer_kinds
from pcg.passes.graphs.gradients import Compress, Prune
from pcg.passes.graphs.lossy import Quantize
from pcg.passes.memory.plan import Frontiers, frontiers
from pcg.passes.memory.save_problem import Choice, SaveProblem

# ------------------------------------------------------------------------------------- base problem


def base_cut(
    base: Graph, search: Search, kind: LayerKind, step: tuple[int, int, RankCosts, int]
) -> Callable[[float], Choice] | None:
    """Return the least saved and recomputed values of a base layer, by picoseconds per byte.

    `step` has the sequences, the tokens of a sequence, the costs, and the ranks that share the
    tokens. None for a layer without a backward.
    """
    if not kind.gradients.backward.outputs:
        return None
    graph, read = _with_parts(base, search, step[2].degree)
    count = len(graph.outputs)
    inputs = tuple(value.name for value in graph.inputs)
    passes_on = set(kind.gradients.wrt) & set(inputs[:count])
    nodes = {node.name: node for node in search.graph.nodes}
    added_to = (nodes[site.nodes[-1]].inputs[0] for site in search.sites)
    wrt = dict.fromkeys([*passes_on, *(name for name in added_to if name in graph.producers)])
    gradients = Compress().run(Prune().run(Differentiate(wrt=tuple(wrt)).run(graph)))
    needed = tuple(dict.fromkeys((*gradients.needed, *read)))
    problem = SaveProblem(gradients.graph, needed, inputs[count:], *step)
    for site in search.sites:
        last = search.kept.seconds(site.nodes[-1])
        problem.add_cost(nodes[site.nodes[-1]].inputs[0], min(last.values()))
    return lambda rate: problem.choose(round(rate * 10**6), 10**6)


def _with_parts(base: Graph, search: Search, degree: int) -> tuple[Graph, list[str]]:
    """Add each rank's part of the values that networks' gradients read; also return these parts."""
    builder, read = Builder.extending(base), []
    computed = base.producers.keys() - search.graph.parameters_by_name.keys()
    for name in _read_by_sites(search):
        if name not in computed:
            continue
        whole, local = search.graph.types[name], base.types[name]
        if local == whole and int(whole.shape[-1]) % degree == 0:
            name = builder.add("own_part", [name], dim=-1, degree=degree, kept=True)
        elif local == whole:
            continue
        read.append(name)
    return base.replace(nodes=tuple(builder.nodes)), read


def _read_by_sites(search: Search) -> list[str]:
    read: dict[str, None] = {}
    site_nodes = {name for site in search.sites for name in site.nodes}
    for node in search.graph.nodes:
        if node.name in site_nodes:
            places, _ = gradient_reads(search.graph, node, search.planner.active)
            read |= dict.fromkeys(node.inputs[place] for place in sorted(places))
    return list(read)


# -------------------------------------------------------------------------------------------- joint


_MOST_PLANS = 128
"""Maximum number of plans of a search; if reached, the bound is below the best step."""
_MOST_STEPS = 8
"""Maximum number of steps with computed cuts, the slowest part of a search."""
_NEARLY = 1 - 1e-9

Plans = tuple[ParallelPlan, ...]


@dataclass(frozen=True)
class Step:
    """A model's sharded layers, with saved and recomputed values within a budget.

    Attributes:
        seconds: forward and backward of all layers on a rank, neighbouring messages coalesced.
        apart_seconds: `seconds` without coalescing.
        again_seconds: the recomputation's part of `seconds`.
        kept_bytes: bytes that the layers save.
    """

    plans: Plans
    frontiers: Frontiers
    seconds: float
    apart_seconds: float
    again_seconds: float
    kept_bytes: int


@dataclass(frozen=True)
class Joint:
    """The best step of a search, and steps to compare it with.

    Attributes:
        limit_bytes: bytes that the layers may save.
        sequential: the step with the layouts that are cheapest alone.
        sequential_seconds: the time of these layouts, with recomputed values chosen by operations.
        bound_seconds: a lower bound of `apart_seconds`.
    """

    best: Step
    limit_bytes: int
    sequential: Step
    sequential_seconds: float
    bound_seconds: float


@dataclass(frozen=True)
class _Part:
    """Layouts of a block's first `sites`."""

    sites: int
    layouts: Mapping[str, Layout]
    gathered: frozenset[str]


@dataclass(frozen=True)
class JointSearch:
    """The search over a model's layouts at a budget.

    Attributes:
        base: a rank's model without bypass networks.
        searches: the searches of its blocks; `blocks` has the base's block of each.
        local: returns a rank's model with bypass networks, for plans of its blocks.
        is_lossy: True if values are saved in codes.
    """

    base: ModelGraph
    blocks: Sequence[int]
    searches: Sequence[Search]
    local: Callable[[Plans], ModelGraph]
    costs: RankCosts
    budget: MemoryBudget
    is_lossy: bool

    def find(self) -> Joint | None:
        """Return the best step; None if the budget does not bind or is below an input a layer."""
        first = self._step(tuple(search.plan() for search in self.searches))
        if first is None or not self._binds(first.frontiers):
            return None
        limit = self.budget.size_bytes
        assert limit is not None
        limit -= first.frontiers.outside_bytes
        rate = _rate(first.frontiers, limit)
        least = 0.0
        if not self.is_lossy:
            least = self._least_of_base(first.frontiers, rate) - rate * limit * PICOSECOND
        steps = [first]
        bounds = [self._block(index, steps, least, rate) for index in range(len(self.searches))]
        best = min(steps, key=lambda step: step.seconds)
        alone = first.frontiers.within(first.frontiers.by_flops, self.budget)
        seconds = first.seconds
        if alone is not None:
            again = sum(choice.cost for choice in alone) * PICOSECOND
            seconds += again - first.again_seconds
        return Joint(best, limit, first, seconds, max(bounds))

    def _binds(self, ways: Frontiers) -> bool:
        chosen = ways.choices(self.budget)
        return chosen is not None and chosen != [front[0] for front in ways.of_layers]

    # --------------------------------------------------------------------------------- one block

    def _block(self, index: int, steps: list[Step], least: float, rate: float) -> float:
        """Search a block's layouts, with the first step's layouts elsewhere; return a lower bound.

        Appends every step with a computed cut.
        """
        search, first = self.searches[index], steps[0]
        count = first.frontiers.model.layers.count(index)
        for plan in search.proposals(rate * PICOSECOND):
            self._add(steps, index, plan)
        rate = 0.0 if self.is_lossy else rate
        rest = least + sum(
            first.frontiers.model.layers.count(other) * other_search.least_cost(rate * PICOSECOND)
            for other, other_search in enumerate(self.searches)
            if other != index
        )
        planner = search.kept.planner(rate * PICOSECOND)
        waiting: list[tuple[float, int, _Part]] = []
        numbers = itertools.count()

        def add(part: _Part) -> None:
            try:
                plan = planner.plan(search.holding(part.layouts, part.gathered))
            except TypeCheckError:
                return  # these layouts are impossible
            heapq.heappush(waiting, (rest + count * plan.cost, next(numbers), part))

        add(_Part(0, {}, frozenset()))
        while waiting and len(steps) < _MOST_STEPS and next(numbers) < _MOST_PLANS:
            bound, _, part = heapq.heappop(waiting)
            if bound >= _best(steps) * _NEARLY:
                return _best(steps)
            if part.sites == len(search.sites):
                self._add(steps, index, search.hold(part.layouts, part.gathered))
                continue
            for inner in _branches(search, first.plans[index], part):
                add(inner)
        return min([_best(steps), *(bound for bound, _, _ in waiting)])

    def _add(self, steps: list[Step], index: int, plan: ParallelPlan) -> None:
        """Append the step with another plan of a block, if it is new and fits the budget."""
        first = steps[0].plans
        plans = (*first[:index], plan, *first[index + 1 :])
        if all(plans != step.plans for step in steps):
            step = self._step(plans)
            steps += [] if step is None else [step]

    # ---------------------------------------------------------------------------------- the cuts

    def _step(self, plans: Plans) -> Step | None:
        """Return the step of plans; None if it does not fit the budget."""
        model = self.local(plans)
        kinds = [replace(kind, gradients=self._ready(kind)) for kind in layer_kinds(model)]
        budget = self.budget
        step = (budget.batch, budget.seq, self.costs, budget.parts)
        ways = frontiers(model, kinds, *step)
        choices = ways.choices(self.budget)
        if choices is None:
            return None
        again = sum(choice.cost for choice in choices) * PICOSECOND
        pairs = zip(self.searches, plans, strict=True)
        together = [search.costs.of(plan).value for search, plan in pairs]
        coalesced = sum(together[block] for block in model.layers)
        apart = sum(plans[block].cost for block in model.layers)
        kept = sum(choice.size_bytes for choice in choices)
        return Step(plans, ways, coalesced + again, apart + again, again, kept)

    def _ready(self, kind: LayerKind) -> Differentiated:
        """Return a kind's gradients after the passes that precede its plan."""
        gradients = Prune().run(kind.gradients)
        return Compress().run(Quantize().run(gradients) if self.is_lossy else gradients)

    def _least_of_base(self, ways: Frontiers, rate: float) -> float:
        """Return a lower bound of all layers' price of recomputed and saved values, in seconds."""
        total = 0.0
        for kind in ways.kinds:
            cut = base_cut(
                self.base.blocks[self.blocks[kind.block]],
                self.searches[kind.block],
                kind,
                (ways.batch, ways.seq, self.costs, ways.parts),
            )
            total += len(kind.layers) * _priced(cut(rate), rate) if cut is not None else 0.0
        return total * PICOSECOND


def _branches(search: Search, plan: ParallelPlan, part: _Part) -> Iterator[_Part]:
    site = search.sites[part.sites]
    for layouts, gathered in search.ways(site, search.chosen(plan, site)):
        held = {**part.layouts, **layouts}
        yield _Part(part.sites + 1, held, part.gathered | gathered)


def _best(steps: Sequence[Step]) -> float:
    return min(step.apart_seconds for step in steps)


def _priced(choice: Choice, rate: float) -> float:
    return choice.cost + rate * choice.size_bytes


def _rate(ways: Frontiers, limit_bytes: int) -> float:
    """Return the picoseconds per byte at which the bound of a step's recomputation is highest."""
    hulls = [front[1:] if len(front) > 1 else front for front in ways.of_kind]
    rates = {
        (then.cost - now.cost) / (now.size_bytes - then.size_bytes)
        for hull in hulls
        for now, then in itertools.pairwise(hull)
    }

    def bound(rate: float) -> float:
        least = [min(_priced(choice, rate) for choice in hull) for hull in hulls]
        return sum(least[kind] for kind in ways.layers) - rate * limit_bytes

    return max(rates, key=bound, default=0.0)

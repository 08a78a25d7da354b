"""Layouts and what is kept, chosen together: the least of all layouts and all sets of storages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Literal

import pytest

from pcg.errors import TypeCheckError
from pcg.ir.analysis.storages import SEQUENCES, Storages
from pcg.ir.program.program import ModelGraph
from pcg.ir.program.saved_memory import outside_bytes, saved_memory
from pcg.ir.types import CONTEXT
from pcg.options import MemoryBudget, PlanOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import PICOSECOND, RankCosts
from pcg.parallel.costs.layer_costs import DeviceCosts
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search
from pcg.passes.attach import attach
from pcg.passes.graphs.differentiate import LayerKind, layer_kinds
from pcg.passes.graphs.gradients import Prune
from pcg.passes.graphs.localize import Localize
from pcg.passes.memory.joint import Joint
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.shard import PlanBase, Shard, shard
from pcg.passes.stages import Attached, Prepared, Sharded, TrainedModel
from tests.support.bypasses import lora
from tests.support.mlp import mlp_model
from tests.support.parallelized import Machine, attached
from tests.support.parameters import mostly_slow

UP, DOWN = "model.layers.{layer}.up", "model.layers.{layer}.down"
DEGREE, TOKENS_HERE = 2, 8
Lossy = Literal["fp8"] | None
Point = tuple[int, float]
"""Bytes that a layer keeps, and seconds that it recomputes."""


class Slow(Machine):
    """A machine on which picoseconds are nothing; `link` bytes a second, messages start at once."""

    def operator_seconds(self, *arguments: object) -> float:
        return 1e6 * super().operator_seconds(*arguments)  # type: ignore[arg-type]


def machine(link: float, alpha: float = 0.0) -> Slow:
    return Slow(alpha, link)


@cache
def prepared(sites: tuple[str, ...]) -> Prepared:
    base = mlp_model()
    adapted = attach(base, lora(dict.fromkeys(sites, 2)))
    return PlanBase(DEGREE).run(Attached(base, adapted, adapted))


def sharding(link: float, size_bytes: int | None, alpha: float = 0.0) -> Shard:
    on = machine(link, alpha)
    budget = (
        MemoryBudget() if size_bytes is None else MemoryBudget(None, size_bytes, 1, TOKENS_HERE)
    )
    costs = DeviceCosts(on, DEGREE, TOKENS_HERE, TOKENS_HERE)  # type: ignore[arg-type]
    return Shard(DEGREE, costs, False, budget, RankCosts(on, DEGREE))  # type: ignore[arg-type]


def joint(sites: tuple[str, ...], link: float, size_bytes: int, alpha: float = 0.0) -> Joint | None:
    return sharding(link, size_bytes, alpha).run(prepared(sites)).joint


# ------------------------------------------------------------------------------------- brute force


def every_plan(search: Search) -> Iterator[ParallelPlan]:
    """The cheapest plan for all layouts of all sites."""
    best = search.plan()
    ways = [list(search.ways(site, search.chosen(best, site))) for site in search.sites]
    seen = []
    for way in itertools.product(*ways):
        layouts = {name: layout for held, _ in way for name, layout in held.items()}
        gathered = frozenset[str]().union(*(some for _, some in way))
        try:
            plan = search.hold(layouts, gathered)
        except TypeCheckError:
            continue
        key = (plan.rules, plan.held, [node.reshards for node in plan.nodes.values()])
        if key not in seen:
            seen.append(key)
            yield plan


def kinds_of(model: ModelGraph, search: Search, plan: ParallelPlan) -> list[LayerKind]:
    block = Localize(DEGREE).run(shard(search.graph, DEGREE, plan))
    return [
        dataclasses.replace(kind, gradients=Prune().run(kind.gradients))
        for kind in layer_kinds(dataclasses.replace(model, blocks=(block,)))
    ]


def every_point(kind: LayerKind, costs: RankCosts) -> list[Point]:
    """Bytes and seconds of every set of storages that backward can do with."""
    graph = kind.gradients.graph
    storages = Storages.of(graph)

    def stored(names: Iterable[str]) -> list[str]:
        return [storages[name].name for name in names if not storages[name].is_parameter]

    needed = set(stored(kind.gradients.needed))
    reads = {name: stored(node.inputs) for name, node in graph.producers.items()}
    seconds = {
        node.name: costs.node_seconds(graph, node, TOKENS_HERE, TOKENS_HERE) for node in graph.nodes
    }
    reach, waiting = set[str](), list(needed)
    while waiting:
        reach.add(waiting[-1])
        waiting += [name for name in reads.get(waiting.pop(), ()) if name not in reach]
    size = {name: int(storages[name].size_bytes(TOKENS_HERE)) for name in reach}
    found = []
    for count in range(len(reach) + 1):
        for kept in map(set, itertools.combinations(sorted(reach), count)):
            again, waiting = set[str](), [name for name in needed if name not in kept]
            while waiting and waiting[-1] in reads:
                again.add(waiting[-1])
                new = (name for name in reads[waiting.pop()] if name not in kept)
                waiting += [name for name in new if name not in again]
            if not waiting:
                nodes = {graph.producers[name].name for name in again}
                found.append((sum(size[n] for n in kept), sum(seconds[n] for n in nodes)))
    return found


def envelope(points: list[Point]) -> list[Point]:
    """The vertices of the lower hull of bytes and seconds."""
    hull = [min(points, key=lambda point: (point[1], point[0]))]
    while rest := [p for p in points if p[0] < hull[-1][0]]:
        size, seconds = hull[-1]
        hull.append(min(rest, key=lambda p: ((p[1] - seconds) / (size - p[0]), p[0])))
    return hull


@cache
def brute(sites: tuple[str, ...], link: float) -> tuple[Point, ...]:
    """Bytes and seconds of the model's best steps, over all layouts and all storages of layers."""
    model = prepared(sites).training
    assert model is not None
    (search,) = sharding(link, None).searches(model, prepared(sites), True)
    costs = RankCosts(machine(link), DEGREE)  # type: ignore[arg-type]
    steps: list[Point] = []
    for plan in every_plan(search):
        kinds = kinds_of(model, search, plan)
        hulls = [envelope(every_point(kind, costs)) for kind in kinds]
        count = sum(len(kind.layers) for kind in kinds)
        steps += [
            (sum(p[0] for p in mix), count * plan.cost + sum(p[1] for p in mix))
            for mix in itertools.product(*hulls)
        ]
    return tuple(envelope(steps))


SLOW = pytest.mark.slow
LINKS = (pytest.param(1e4, marks=SLOW), pytest.param(1e5, marks=SLOW), 1e6)


def check(sites: tuple[str, ...], link: float) -> int:
    """At the bytes of each best step the search finds it; how often it was asked."""
    asked = 0
    model = prepared(sites).training
    assert model is not None
    outside = outside_bytes(model, (), TOKENS_HERE)
    for size, seconds in brute(sites, link):
        found = joint(sites, link, size + outside)
        if found is None:
            continue  # that much does not bind
        asked += 1
        assert found.best.kept_bytes <= found.limit_bytes
        assert found.best.seconds == pytest.approx(seconds, rel=1e-6)
        assert found.bound_seconds <= found.best.apart_seconds * (1 + 1e-9)
        assert found.best.seconds <= found.sequential_seconds * (1 + 1e-12)
    return asked


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("sites", [(UP,), (DOWN,)], ids=["up", "down"])
def test_no_layouts_with_no_storages_take_less(sites: tuple[str, ...], link: float) -> None:
    assert check(sites, link)


@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=pytest.mark.slow), 1e-4])
def test_never_worse_than_one_after_the_other(alpha: float) -> None:
    """Of two sites, where messages take time to start and may be coalesced."""
    sites, asked = (UP, DOWN), 0
    for size, link in itertools.product((520, 760), (1e5, 1e6)):
        found = joint(sites, link, size, alpha)
        if found is None:
            continue
        asked += 1
        assert found.best.seconds <= found.sequential.seconds
        assert found.best.seconds <= found.sequential_seconds * (1 + 1e-12)
        assert found.best.kept_bytes <= found.limit_bytes
        assert found.bound_seconds <= found.best.apart_seconds * (1 + 1e-9)
    assert asked


# --------------------------------------------------------------------------------------- pipelines


@cache
def trained(size: int | float, lossy: Lossy = None) -> tuple[Sharded, TrainedModel]:
    """A family's model of two layers over ranks of a data sheet, with a budget."""
    options = PlanOptions(
        tp=2, batch=2, seq=64, memory_budget=size, costs="L40S", lossy_activations=lossy
    )
    passes = pipeline(Settings(options, costs=find_cost_model("L40S")))
    sharded = passes.parallelize.run(attached("llama3"))
    pruned = passes.prune.run(passes.differentiate.run(sharded))
    found = passes.rematerialize.run(passes.compress.run(pruned)).training
    assert isinstance(sharded, Sharded)
    assert found is not None
    return sharded, found


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("lossy", mostly_slow([None, "fp8"], None))
def test_what_is_weighed_is_what_is_planned_and_saved(lossy: Lossy, part: int) -> None:
    _, most = trained(1.0, lossy)
    sizes = [point[0] for point in most.frontiers.points()]
    size = ((3 - part) * sizes[0] + part * min(sizes)) // 3
    sharded, found = trained(size, lossy)
    assert sharded.joint is not None
    plan = found.plan
    kept = sum(plan.choices[index].size_bytes for index in plan.layers)
    assert kept == sharded.joint.best.kept_bytes
    assert kept <= size - found.frontiers.outside_bytes == sharded.joint.limit_bytes
    again = sum(plan.choices[index].cost for index in plan.layers) * PICOSECOND
    assert again == pytest.approx(sharded.joint.best.again_seconds)
    assert sharded.plans == sharded.joint.best.plans
    saved = saved_memory(found.model, found.plan).total.subs({SEQUENCES: 2, CONTEXT: 64})
    assert saved == kept + found.frontiers.outside_bytes


def test_what_does_not_bind_changes_nothing() -> None:
    sharded, most = trained(1.0)
    size = most.frontiers.points()[0][0]
    loose, found = trained(size)
    assert sharded.joint is loose.joint is None
    assert found.graphs == most.graphs


def test_a_recompute_pays_for_the_messages_that_it_repeats() -> None:
    """At fewer bytes than the most, less time than by operations alone, where links are slow."""
    _, most = trained(1.0)
    found = most.frontiers
    sizes = [point[0] for point in found.points()]
    saved = []
    for part in range(1, 8):
        budget = MemoryBudget(None, sizes[0] - (sizes[0] - min(sizes)) * part // 8, 2, 64)
        ours, alone = found.choices(budget), found.within(found.by_flops, budget)
        if ours is None or alone is None:
            continue
        saved.append(sum(c.cost for c in alone) - sum(c.cost for c in ours))
    assert min(saved) >= 0
    assert max(saved) > 0

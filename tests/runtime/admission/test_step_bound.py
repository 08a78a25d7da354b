"""What one tenant may add to the steps of others, in simulated time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import pairwise, repeat
from typing import Any

import pytest

from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policies import Fcfs
from pcg.runtime.admission.policy import Policy
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts

COSTS = LinearCosts(token_s=1e-3)
"""A row is a tenth of a step."""


def ask(tenant: str, prompt: int = 4, new: int = 20, name: str = "", priority: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request((1,) * prompt, params, tenant=tenant, request_id=name, priority=priority)


def make_engine(policy: Policy, running: int = 64, pages: int = 4000) -> SimulatedEngine:
    return SimulatedEngine(COSTS, pages, 1000, Limits(running=running), policy=policy)


def gaps_of(engine: SimulatedEngine, names: Iterable[str]) -> list[float]:
    found = []
    for name in names:
        times = [event.time_s for event in engine.log.of(name) if event.kind is Kind.TOKEN]
        found += [b - a for a, b in pairwise(times)]
    return found


def run(policy: Policy, hostile: str | None, prompt: int = 4, new: int = 20) -> SimulatedEngine:
    """Two tenants with a request at a time each, beside as much as a third one can ask for."""
    engine = make_engine(policy)
    for turn in range(14):
        if hostile is not None:
            for _ in range(40):
                engine.submit(ask(hostile, prompt, new))
        names = [engine.submit(ask(tenant, name=f"{tenant} {turn}")) for tenant in "ab"]
        while any(name in engine.requests.by_id for name in names):
            engine.step()
            engine.check_integrity()
    return engine


def modest_gaps(engine: SimulatedEngine) -> list[float]:
    return gaps_of(engine, [f"{tenant} {turn}" for tenant in "ab" for turn in range(3, 14)])


@pytest.mark.parametrize("prompt", [4, 300])
@pytest.mark.parametrize(("stretch", "most"), [(1.5, 1.5), (1.2, 1.2)])
def test_a_flood_has_its_share_of_a_step(stretch: float, most: float, prompt: int) -> None:
    """Its steps are as long as the operator says."""
    without = statistics.mean(modest_gaps(run(FairShare(), None)))
    flooded = run(FairShare(stretch=stretch), "greedy", prompt)
    found = modest_gaps(flooded)
    assert statistics.mean(found) <= most * 1.03 * without
    assert statistics.quantiles(found, n=100)[97] <= most * 1.1 * without
    unbounded = modest_gaps(run(Fcfs(), "greedy", 4))
    assert statistics.mean(unbounded) > 3 * without
    # The rest of the time is its own, and all of it where nobody else is there.
    while not flooded.is_idle:
        flooded.step()
    flooded.check_integrity()


def test_requests_without_a_tenant_are_not_bounded() -> None:
    """They are the flood here, and have every step as first come, first served would have it."""
    orders = []
    for policy in (FairShare(), Fcfs()):
        engine = run(policy, "")
        orders.append([(e.kind, e.subject) for e in engine.log if e.kind is Kind.PREEMPTED])
        running = [len(plan) for plan in steps_of(engine)]
        assert max(running) > 40
    assert orders == [[], []]


def steps_of(engine: SimulatedEngine) -> list[list[str]]:
    """The requests that had a token in each step."""
    found: dict[float, list[str]] = {}
    for event in engine.log:
        if event.kind is Kind.TOKEN:
            found.setdefault(event.time_s, []).append(event.subject)
    return list(found.values())


def test_a_newcomer_waits_for_no_long_step() -> None:
    """A flood that is alone for now runs in steps of 0.2 s, and not all of its prompts at once."""
    engine = run(FairShare(), None)
    for _ in range(40):
        engine.submit(ask("greedy", prompt=300))
    before, longest = engine.clock.now_s(), 0.0
    while not engine.is_idle:
        engine.step()
        before, now = engine.clock.now_s(), before
        longest = max(longest, before - now)
    assert 0.15 < longest < 0.22


def test_what_waits_for_room_in_a_step_is_served_in_the_end() -> None:
    """Also where no row of it fits: one runs now and then."""
    engine = make_engine(FairShare(stretch=1.001))
    flood = [engine.submit(ask("greedy", new=4)) for _ in range(8)]
    names = [engine.submit(ask("a", new=3000, prompt=1))]
    for _ in range(2500):
        engine.step()
    assert names[0] in engine.requests.by_id
    ended = [event.subject for event in engine.log if event.kind is Kind.FINISHED]
    assert set(ended) & set(flood)
    engine.check_integrity()


def test_a_long_prompt_of_a_heavy_tenant_gets_on_beside_a_stream() -> None:
    """Also where a token of it takes more than it may add to a step, as far behind its context."""
    costs = LinearCosts(layers=30, constant_s=0.017, token_s=6e-4, key_s=1.4e-6)
    engine = SimulatedEngine(costs, 4000, 1000, Limits(running=64), policy=FairShare())
    stream = engine.submit(ask("a", new=60_000, prompt=20))
    for _ in range(50):
        engine.step()
    prompt = engine.submit(ask("long", new=1, prompt=4800))
    steps = 0
    while prompt in engine.requests.by_id:
        engine.step()
        steps += 1
        assert steps < 16_000
    gaps = sorted(gaps_of(engine, [stream])[50:])
    assert sum(gap > 2 * gaps[0] for gap in gaps) <= 0.01 * len(gaps)
    assert gaps[-1] <= 15 * gaps[0]
    engine.check_integrity()


@pytest.mark.parametrize("pages", [4000, 40])
def test_the_one_who_runs_most_makes_room(pages: int) -> None:
    """Where places or pages are taken, a tenant that has none waits for a step and not for all."""
    engine = make_engine(FairShare(), running=8, pages=pages)
    for _ in range(20):
        engine.submit(ask("greedy", prompt=30, new=300))
    for _ in range(4):
        engine.step()
    name = engine.submit(ask("modest", prompt=30))
    for _ in range(6):
        engine.step()
        engine.check_integrity()
    assert any(event.kind is Kind.TOKEN for event in engine.log.of(name))
    # No more than one gave way for it, and it goes on where it was.
    assert sum(event.kind is Kind.PREEMPTED for event in engine.log) == 1
    while not engine.is_idle:
        engine.step()
    assert sum(event.kind is Kind.FINISHED for event in engine.log) == 21


@pytest.mark.parametrize("policy", [Fcfs, FairShare])
def test_the_least_urgent_gives_up_its_pages(policy: type[Policy]) -> None:
    """Whoever was admitted first: one of the highest priority number."""
    engine = make_engine(policy(), running=8, pages=8)
    urgent = [engine.submit(ask("t", 15, 40, f"{p} {i}", p)) for p in (9, 0) for i in range(2)]
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    preempted = {event.subject for event in engine.log if event.kind is Kind.PREEMPTED}
    assert preempted
    assert preempted <= set(urgent[:2])


def beside_one(policy: Policy) -> tuple[SimulatedEngine, str]:
    """An engine that decodes for a modest tenant, and has learned how long its steps take."""
    engine = make_engine(policy)
    name = engine.submit(ask("a", new=400))
    for _ in range(30):
        engine.step()
    return engine, name


def test_the_first_flood_of_an_engine_is_bounded() -> None:
    """A step that only decodes tells how long steps are, before the flood's prompts come."""
    engine = make_engine(FairShare())
    name = engine.submit(ask("a", new=100))
    engine.step()
    for _ in range(200):
        engine.submit(ask("greedy", prompt=8))
    while name in engine.requests.by_id:
        engine.step()
    gaps = gaps_of(engine, [name])
    assert statistics.mean(gaps) <= 1.25 * gaps[0]
    assert max(gaps[8:]) <= 1.3 * gaps[0]


def test_a_long_prompt_makes_its_tenant_heavy_before_it_runs() -> None:
    """Its tenant ran nothing before, and yet the prompt comes in chunks that fit."""
    engine, name = beside_one(FairShare())
    engine.submit(ask("greedy", prompt=3000, new=4))
    before = len(gaps_of(engine, [name]))
    for _ in range(60):
        engine.step()
    gaps = gaps_of(engine, [name])
    assert max(gaps[before:]) <= 1.25 * statistics.median(gaps[:before])


def test_few_of_a_flood_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that wait are as much work for a step as some, while they cannot all run."""
    engine, name = beside_one(FairShare(stretch=1.05))
    for _ in range(1000):
        engine.submit(ask("greedy"))
    found: list[int] = []
    first = engine.scheduler.policy.first

    def counted(*given: Any) -> Any:
        in_turn = first(*given)
        found.append(sum(one.request.tenant == "greedy" for one in in_turn))
        return in_turn

    monkeypatch.setattr(engine.scheduler.policy, "first", counted)
    modest = engine.submit(ask("b"))
    for _ in range(100):
        engine.step()
    assert name in engine.requests.by_id
    assert max(found) <= 4
    assert any(event.kind is Kind.TOKEN for event in engine.log.of(modest))


def test_a_job_counts_as_use_of_its_tenant() -> None:
    """Of two tenants that ask for as much, the one without a job is served first."""
    served = {}
    for owner in ("", "a"):
        limits = Limits(running=4, finetuning_floor=0.5)
        engine = SimulatedEngine(COSTS, 4000, 1000, limits, policy=FairShare())
        job = engine.finetune("job", repeat((64,)))
        job.tenant = owner
        for turn, tenant in enumerate("ab" * 100):
            engine.submit(ask(tenant, name=f"{tenant} {turn}"))
        while len(engine.requests.by_id) > 100:
            engine.step()
        assert job.tokens > 500
        found = [event.subject for event in engine.log if event.kind is Kind.FINISHED]
        served[owner] = sum(name.startswith("b") for name in found)
    assert served[""] == pytest.approx(50, abs=4)
    assert served["a"] > 65

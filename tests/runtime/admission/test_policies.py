"""Whose turn it is: fairness, priorities, and a cost that the queue's length does not change."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise, repeat
from random import Random
from types import FrameType
from typing import Any

import pytest

from pcg.errors import GenerationError
from pcg.runtime.admission import policies
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.latency import Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policies import AdapterClustering, EarlyAbort, Fcfs
from pcg.runtime.admission.policy import Policy
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts
from tests.support.small_engine import run

POLICIES = [
    *(made for made in policies.POLICIES.values() if made is not AdapterClustering),
    lambda: AdapterClustering(2),
]


def ask(tenant: str = "", prompt: int = 10, new: int = 4, **fields: Any) -> Request:
    return Request((1,) * prompt, SamplingParams(max_new_tokens=new), tenant=tenant, **fields)


def make_engine(policy: Policy | None = None, running: int = 4, pages: int = 64) -> SimulatedEngine:
    return SimulatedEngine(LinearCosts(), pages, 1000, Limits(running=running), policy=policy)


def admitted(engine: SimulatedEngine, requests: Iterable[Request]) -> list[str]:
    """Requests by the order of their first admission, if all of them come at once."""
    for request in requests:
        engine.submit(request)
    run(engine)
    found = [event.subject for event in engine.log if event.kind is Kind.ADMITTED]
    return list(dict.fromkeys(found))


def test_by_default_a_tenant_is_not_starved_by_another() -> None:
    names = [ask("greedy", request_id=f"greedy {i}") for i in range(200)]
    order = admitted(make_engine(), [*names, ask("modest", request_id="modest")])
    assert order.index("modest") < 4


def test_without_tenants_fair_share_is_first_come_first_served() -> None:
    """Beside cancelled requests, and preempted ones, which go first."""
    orders = []
    for policy in (FairShare(), Fcfs(), None):
        random, engine = Random(3), make_engine(policy, running=6, pages=9)
        for step in range(400):
            if step < 200:
                engine.submit(ask("", random.randint(1, 40), random.randint(1, 40)))
            if random.random() < 0.2:
                engine.cancel(f"request {random.randrange(200)}")
            engine.step()
        kinds = [event.kind for event in engine.log]
        assert Kind.PREEMPTED in kinds
        assert Kind.CANCELLED in kinds
        orders.append([(event.time_s, event.kind, event.subject) for event in engine.log])
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("make", POLICIES)
def test_lower_priorities_go_first(make: Callable[[], Policy]) -> None:
    asked = [ask("a", priority=p, request_id=f"{p} {i}") for i in range(3) for p in (5, -2, 0)]
    order = admitted(make_engine(make(), running=1), asked)
    assert [name.split()[0] for name in order] == ["-2"] * 3 + ["0"] * 3 + ["5"] * 3


def test_nobody_saves_up_and_no_counter_outlives_its_use() -> None:
    """A tenant that was away has no more than its share; thousands of tenants leave nothing."""
    policy = FairShare()
    engine = make_engine(policy, running=2)
    for i in range(2000):
        engine.submit(ask(f"tenant {i}", new=1))
    for i in range(100):
        engine.submit(ask("stays", request_id=f"s{i}"))
    while len(engine.scheduler.waiting) > 60:
        engine.step()
    assert len(policy._served) < 200
    comes = [engine.submit(ask("returns", request_id=f"r{i}")) for i in range(20)]
    for _ in range(40):
        engine.step()
    admitted_now = [e.subject for e in engine.log if e.kind is Kind.ADMITTED][-16:]
    assert 5 <= sum(name in comes for name in admitted_now) <= 11
    while not engine.is_idle:
        engine.step()
    assert not policy._served


@pytest.mark.parametrize("n", [1, 5])
def test_so_many_of_a_tenant_run_at_once(n: int) -> None:
    """Its other requests and continuations wait, whatever room there is, and all come to an end."""
    engine = make_engine(FairShare(tenant_running=2), running=8)
    params = SamplingParams(max_new_tokens=4, n=n, temperature=1.0)
    for tenant in "aaaaab":
        engine.submit(Request((1,) * 10, params, tenant=tenant))
    most = ended = 0
    while not engine.is_idle:
        ended += sum(chunk.completion is not None for chunk in engine.step())
        engine.check_integrity()
        running = [sequence.request.tenant for sequence in engine.scheduler.running]
        assert running.count("a") <= 2
        most = max(most, len(running))
    assert ended == 6 * n
    assert most == 2 + min(n, 2)
    for wrong in (0, 1.5, True):
        with pytest.raises(GenerationError, match="tenant_running="):
            FairShare(tenant_running=wrong)  # type: ignore[arg-type]


def test_a_policy_is_of_one_engine() -> None:
    policy = FairShare()
    make_engine(policy)
    with pytest.raises(GenerationError, match="FairShare keeps the waiting requests of another"):
        make_engine(policy)


def naive_clusters(waiting: list[Sequence], there: set[str | None]) -> list[Sequence]:
    """S-LoRA's order, by sorting everything."""

    def name(one: Sequence) -> str | None:
        return None if one.request.adapter is None else one.request.adapter.name

    return sorted(waiting, key=lambda one: name(one) not in there)


def test_clusters_go_first() -> None:
    random, policy = Random(0), AdapterClustering(2)
    adapters = [None, *(SimulatedAdapter(name, 100) for name in "abcde")]
    waiting: list[Sequence] = []
    for number in range(300):
        request = Request((1,), SamplingParams(), random.choice(adapters))
        one = Sequence(str(number), number, request, limit=1)
        policy.add(one)
        waiting.append(one)
        if number % 3:
            gone = waiting.pop(random.randrange(len(waiting)))
            policy.admit(gone, 0.0)
            if number % 2:
                policy.put_back(gone)
                waiting.insert(0, gone)
        running = random.sample(waiting, min(3, len(waiting)))
        there = {None if s.request.adapter is None else s.request.adapter.name for s in running}
        expected = naive_clusters(waiting, there) if len(there) >= 2 else waiting
        assert list(policy.first(8, 0.0, running)) == expected[:8]


def operations(engine: SimulatedEngine, steps: int | None = None) -> int:
    """Count the bytecodes that Python runs in some steps, or until the engine is idle."""
    total = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal total
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        total += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        for _ in itertools.count() if steps is None else range(steps):
            if steps is None and engine.is_idle:
                break
            engine.step()
    finally:
        sys.settrace(before)
    return total


@pytest.mark.parametrize("make", POLICIES)
def test_a_step_costs_the_same_however_many_wait(make: Callable[[], Policy]) -> None:
    found = []
    for waiting in (20, 2000):
        engine = make_engine(make(), running=4)
        engine.finetune("blocked", [(16 * 40,)])  # more than its half of the pages
        adapters = [SimulatedAdapter(name, 1000) for name in "abc"]
        for i in range(waiting):
            adapter = adapters[i % 3]
            engine.submit(ask(f"{i % 5}", adapter=adapter, priority=i % 7, ttft_slo_s=1e6))
        for _ in range(3):
            engine.step()
        found.append(operations(engine, 12))
    few, many = found
    assert many < 1.5 * few


# ---------------------------------------------------------------------------------- steps of others

COSTS = LinearCosts(token_s=1e-3)
"""A row is a tenth of a step."""


def asked(
    tenant: str, prompt: int = 4, new: int = 20, name: str = "", priority: int = 0
) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request((1,) * prompt, params, tenant=tenant, request_id=name, priority=priority)


def wide_engine(policy: Policy, running: int = 64, pages: int = 4000) -> SimulatedEngine:
    return SimulatedEngine(COSTS, pages, 1000, Limits(running=running), policy=policy)


def gaps_of(engine: SimulatedEngine, names: Iterable[str]) -> list[float]:
    found = []
    for name in names:
        times = [event.time_s for event in engine.log.of(name) if event.kind is Kind.TOKEN]
        found += [b - a for a, b in pairwise(times)]
    return found


def flooded_by(
    policy: Policy, hostile: str | None, prompt: int = 4, new: int = 20
) -> SimulatedEngine:
    """Two tenants with a request at a time each, beside as much as a third one can ask for."""
    engine = wide_engine(policy)
    for turn in range(14):
        if hostile is not None:
            for _ in range(40):
                engine.submit(asked(hostile, prompt, new))
        names = [engine.submit(asked(tenant, name=f"{tenant} {turn}")) for tenant in "ab"]
        while any(name in engine.requests.by_id for name in names):
            engine.step()
            engine.check_integrity()
    return engine


def modest_gaps(engine: SimulatedEngine) -> list[float]:
    return gaps_of(engine, [f"{tenant} {turn}" for tenant in "ab" for turn in range(3, 14)])


@pytest.mark.parametrize(
    ("stretch", "prompt"),
    [
        (1.5, 4),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1.5, 300), (1.2, 4), (1.2, 300))),
    ],
)
def test_a_flood_has_its_share_of_a_step(stretch: float, prompt: int) -> None:
    """Its steps are as long as the operator says."""
    without = statistics.mean(modest_gaps(flooded_by(FairShare(), None)))
    flooded = flooded_by(FairShare(stretch=stretch), "greedy", prompt)
    found = modest_gaps(flooded)
    assert statistics.mean(found) <= 1.03 * stretch * without
    assert statistics.quantiles(found, n=100)[97] <= 1.1 * stretch * without
    unbounded = modest_gaps(flooded_by(Fcfs(), "greedy", 4))
    assert statistics.mean(unbounded) > 3 * without
    # The rest of the time is its own, and all of it where nobody else is there.
    while not flooded.is_idle:
        flooded.step()
    flooded.check_integrity()


@pytest.mark.parametrize("pages", [4000, 40])
def test_the_one_who_runs_most_makes_room(pages: int) -> None:
    """Where places or pages are taken, a tenant that has none waits for a step and not for all."""
    engine = wide_engine(FairShare(), running=8, pages=pages)
    for _ in range(20):
        engine.submit(asked("greedy", prompt=30, new=300))
    for _ in range(4):
        engine.step()
    name = engine.submit(asked("modest", prompt=30))
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
    engine = wide_engine(policy(), running=8, pages=8)
    urgent = [engine.submit(asked("t", 15, 40, f"{p} {i}", p)) for p in (9, 0) for i in range(2)]
    run(engine)
    preempted = {event.subject for event in engine.log if event.kind is Kind.PREEMPTED}
    assert preempted
    assert preempted <= set(urgent[:2])


def test_a_job_counts_as_use_of_its_tenant() -> None:
    """Of two tenants that ask for as much, the one without a job is served first."""
    served = {}
    for owner in ("", "a"):
        limits = Limits(running=4, finetuning_floor=0.5)
        engine = SimulatedEngine(COSTS, 4000, 1000, limits, policy=FairShare())
        job = engine.finetune("job", repeat((64,)))
        job.tenant = owner
        for turn, tenant in enumerate("ab" * 100):
            engine.submit(asked(tenant, name=f"{tenant} {turn}"))
        while len(engine.requests.by_id) > 100:
            engine.step()
        assert job.tokens > 500
        found = [event.subject for event in engine.log if event.kind is Kind.FINISHED]
        served[owner] = sum(name.startswith("b") for name in found)
    assert served[""] == pytest.approx(50, abs=4)
    assert served["a"] > 65


# -------------------------------------------------------------------------------------------- costs

TYPES = [Fcfs, AdapterClustering, EarlyAbort, FairShare]


def loaded_engine(
    running: int, pages: int, policy: Policy | None = None, new_tokens: int = 40
) -> SimulatedEngine:
    """An engine with two requests for each place, of lengths and adapters that repeat."""
    limits = Limits(running, 1 << 20, ttft_slo_s=1e6, tpot_slo_s=1e6)
    engine = SimulatedEngine(LinearCosts(), pages, 1000, limits=limits, policy=policy)
    engine.scheduler.forward = Latency(0.01, 1e-4, 1e-8)
    adapters = [SimulatedAdapter(f"adapter {i}", 2000) for i in range(running // 4)]
    for i in range(2 * running):
        params = SamplingParams(max_new_tokens=new_tokens + i % 8)
        adapter = adapters[i % len(adapters)]
        engine.submit(Request((1,) * (9 + i % 16), params, adapter, tenant=str(i % 3)))
    return engine


@pytest.mark.parametrize(
    ("policy", "pages"),
    [
        pytest.param(*one, marks=() if one in ((FairShare, 8), (Fcfs, 2)) else pytest.mark.slow)
        for one in itertools.product(TYPES, (8, 2))
    ],
)
def test_operations_grow_with_the_requests(policy: type[Policy], pages: int) -> None:
    """Four times as many requests over four times as many pages: admissions, steps and ends."""
    few, many = (operations(loaded_engine(n, pages * n, policy(), 24)) for n in (8, 32))
    assert 1.5 * few < many < 4 * few  # what a step costs whatever it runs is in both

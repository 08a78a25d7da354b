"""What prompts may add to a step, and whose turn it is to read one, in simulated time."""

from __future__ import annotations

import gc
import math
import statistics
import weakref
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pcg.errors import BenchmarkError, GenerationError, ServeError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import EventLog, Kind
from pcg.runtime.metrics.report import Outcome, serving_report
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.serve.engine.options import ServeOptions
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.engine_life import POLICIES, EngineLife
from tests.support.linear_costs import LinearCosts
from tests.support.small_engine import LORA, make_engine, make_executor, run

CPU = LinearCosts(layers=30, constant_s=0.017, token_s=6e-4, key_s=9e-7)
"""SmolLM2-135M on a core, by `benchmarks/engine.py`."""
LONG = 4830


def ask(name: str, prompt: int, new: int = 1, priority: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request((1,) * prompt, params, request_id=name, priority=priority)


def simulated(costs: LinearCosts = CPU, **limits: float) -> SimulatedEngine:
    return SimulatedEngine(costs, 10_000, 1000, Limits(**limits))  # type: ignore[arg-type]


def streaming(engine: SimulatedEngine, tokens: int = 32) -> None:
    """Run a request that streams until it has some tokens."""
    engine.submit(ask("stream", 30, 100_000))
    while len(times(engine, "stream")) < tokens:
        engine.step()


def times(engine: SimulatedEngine, name: str) -> list[float]:
    return [event.time_s for event in engine.log.of(name) if event.kind is Kind.TOKEN]


def first_token_s(engine: SimulatedEngine, name: str) -> float:
    """Step until a request has its first token; returns the time since it was submitted."""
    for _ in range(20_000):
        if found := times(engine, name):
            return found[0] - engine.log.of(name)[0].time_s
        engine.step()
        engine.check_integrity()
    raise AssertionError(f"{name} has no token")


def gaps_beside(engine: SimulatedEngine) -> list[float]:
    """Return the gaps of the stream beside prompts, in its median before any came."""
    gaps = [b - a for a, b in pairwise(times(engine, "stream"))]
    return [gap / statistics.median(gaps[:31]) for gap in gaps[31:]]


@given(
    constant_s=st.floats(1e-4, 1.0),
    tokens=st.floats(2, 1000),
    keys=st.floats(1000, 1e6),
    stretch=st.floats(2, 20),
    prompts=st.lists(st.integers(100, 5000), min_size=1, max_size=2),
)
@settings(max_examples=15, deadline=None)
def test_no_prompt_stretches_a_gap_further_than_the_limit(
    constant_s: float, tokens: float, keys: float, stretch: float, prompts: list[int]
) -> None:
    """Whatever a token and a key take in relation to a step, which the engine is not told."""
    costs = LinearCosts(8, constant_s, constant_s / tokens, constant_s / tokens / keys)
    engine = simulated(costs, prompt_stretch=stretch)
    streaming(engine)
    for place, length in enumerate(prompts):
        engine.submit(ask(f"long {place}", length))
    for _ in range(200):
        engine.step()
    found = gaps_beside(engine)
    assert max(found) <= 2.5 * stretch  # the first chunks are sized by the first guess
    assert max(found[4:], default=0.0) <= 1.3 * stretch


def test_a_long_prompt_holds_a_stream_as_long_as_the_default_says() -> None:
    engine = simulated()
    streaming(engine)
    engine.submit(ask("long", LONG))
    took_s = first_token_s(engine, "long")
    assert max(gaps_beside(engine)) <= 1.1 * Limits().prompt_stretch
    # Steps beside it are a tenth of its own time.
    alone = simulated(prompt_stretch=math.inf)
    alone.submit(ask("long", LONG))
    assert took_s <= 1.3 * first_token_s(alone, "long")


@pytest.mark.parametrize("longs", [1, 12])
def test_a_short_request_has_its_turn_beside_long_prompts(longs: int) -> None:
    """It waits for a few steps, and not for the prompts before it, which take seconds each."""
    engine = simulated()
    streaming(engine)
    for place in range(longs):
        engine.submit(ask(f"long {place}", LONG))
    engine.step()
    engine.submit(ask("short", 30))
    most_s = Limits().prompt_stretch * (CPU.constant_s + CPU.token_s)
    assert first_token_s(engine, "short") <= (4 + longs) * most_s
    assert not any(times(engine, f"long {place}") for place in range(longs))


def test_short_requests_do_not_starve_a_long_prompt() -> None:
    """Every other step is that of the prompt admitted first."""
    alone = simulated()
    alone.submit(ask("long", LONG))
    alone_s = first_token_s(alone, "long")
    engine = simulated(running=1000)
    engine.submit(ask("long", LONG))
    engine.step()
    count = 0
    while not times(engine, "long"):
        engine.submit(ask(f"short {count}", 100))
        count += 1
        engine.step()
    waited_s = times(engine, "long")[0]
    assert count > 20
    assert waited_s <= 2.5 * alone_s


def test_a_request_of_lower_priority_does_not_pass_a_long_prompt() -> None:
    engine = simulated()
    engine.submit(ask("long", LONG, priority=0))
    engine.step()
    engine.submit(ask("short", 30, priority=1))
    engine.submit(ask("urgent", 30, priority=-1))
    first_token_s(engine, "urgent")
    assert not times(engine, "short")
    first_token_s(engine, "long")
    assert not times(engine, "short") or times(engine, "short") >= times(engine, "long")


@pytest.mark.parametrize("value", [1.0, 0, -2.0, math.nan])
def test_values_that_bound_nothing_are_refused(value: float) -> None:
    with pytest.raises(GenerationError, match=r"prompt_stretch=.*above 1"):
        Limits(prompt_stretch=value)
    with pytest.raises(ServeError, match=r"prompt_stretch=.*above 1"):
        ServeOptions(prompt_stretch=value)


# --------------------------------------------------------------- what is over leaves nothing behind

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}


def test_an_adapter_removed_in_use_leaves_with_its_last_request() -> None:
    executor = make_executor()
    engine = make_engine(executor)
    for _ in range(5):
        adapter = executor.add_adapter("again", LORA)
        for _ in range(2):
            engine.submit(executor.request([1, 2, 3], "again", **GREEDY))
        engine.step()
        executor.remove_adapter("again")
        assert len(engine.scheduler.adapters) == 1  # two requests run with it
        run(engine)
        assert len(engine.scheduler.adapters) == 0
    assert [event.kind for event in engine.log].count(Kind.EVICTED) == 5
    gone = weakref.ref(adapter)
    assert [one.name for one in executor.adapters.values()] == ["a"]
    del adapter
    gc.collect()
    assert gone() is None  # nor do its weights stay in a slot


def test_times_of_requests_that_are_over_are_forgotten() -> None:
    """And they are not those of a later request with the same id."""
    engine = SimulatedEngine(LinearCosts(), 64, 1000)
    params = SamplingParams(max_new_tokens=2)
    for _ in range(2000):
        engine.submit(Request((1,), params, request_id="same", timeout_s=1e6))
        run(engine)
    assert len(engine.requests.deadlines) < 200
    engine.submit(Request((1,), params, request_id="again", timeout_s=0.5))
    run(engine)
    long = SamplingParams(max_new_tokens=200)
    engine.submit(Request((1,), long, request_id="again"))
    run(engine)
    assert engine.clock.now_s() > 0.5
    assert engine.log.of("again")[-1].kind is Kind.FINISHED


def served(engine: SimulatedEngine, count: int) -> None:
    for _ in range(count):
        engine.submit(Request((1,) * 10, SamplingParams(max_new_tokens=5)))
    while not engine.is_idle:
        engine.step()


def test_reports_of_a_log_that_drops_events() -> None:
    """They are of the requests that came since; recordings are whole, and totals always are."""
    engine = SimulatedEngine(LinearCosts(), 64, 1000, log=EventLog(200))
    served(engine, 20)
    start_s = engine.clock.now_s()
    recorded, end = engine.log.recording()
    served(engine, 50)
    end()
    served(engine, 10)
    report = serving_report(engine.log)
    assert report.count(Outcome.FINISHED) == 10  # all that came in the time that it has
    assert engine.totals.requests["finished"] == 80
    assert engine.totals.output_tokens == 400
    tokens = sum(1 for event in engine.log if event.kind is Kind.TOKEN)
    assert report.output_tokens == tokens
    with pytest.raises(BenchmarkError, match=r"lacks events up to .* or record the span"):
        serving_report(engine.log, start_s=start_s)
    whole = serving_report(recorded, start_s=start_s)
    assert whole.count(Outcome.FINISHED) == len(whole.requests) == 50
    assert whole.output_tokens == 250
    with pytest.raises(BenchmarkError, match="lacks events"):
        serving_report(recorded, start_s=0.0)


# -------------------------------------------------------------------------------- random operations

NAMES = st.sampled_from("pqrstu")
STEPS = 5000


@pytest.mark.parametrize("pages", [7, 24, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_random_operations(policy: str, pages: int) -> None:
    for seed in range(2):
        life = EngineLife(policy, pages, promises=bool(seed), seed=pages + seed)
        for _ in range(600):
            life.random_operation()
        life.finish(STEPS)
        assert life.finished > 30
        assert life.cached > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_soak(policy: str) -> None:
    """100,000 operations; finetuning, promises and a pool that is always short of pages."""
    life = EngineLife(policy, seed=5)
    for _ in range(100_000):
        life.random_operation()
    life.finish(STEPS)
    assert life.finished > 5_000


class Machine(RuleBasedStateMachine):
    """Operations in any order, which hypothesis shrinks when one breaks something."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        pages=st.integers(4, 30),
        promises=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def start(self, policy: str, pages: int, promises: bool, prefix_caching: bool) -> None:
        self.life = EngineLife(policy, pages, promises, prefix_caching=prefix_caching)

    @rule(
        prompt=st.integers(1, 90),
        tokens=st.integers(1, 20),
        adapter=st.none() | NAMES,
        tenant=st.sampled_from("abc"),
        timeout_s=st.none() | st.floats(0.001, 2.0),
        own=st.integers(0, 90),
    )
    def submit(
        self,
        prompt: int,
        tokens: int,
        adapter: str | None,
        tenant: str,
        timeout_s: float | None,
        own: int,
    ) -> None:
        known = adapter if adapter in self.life.adapters else None
        self.life.submit(prompt, tokens, known, tenant, timeout_s, own)

    @rule(place=st.integers(0, 100))
    def cancel(self, place: int) -> None:
        self.life.cancel(place)

    @rule(name=NAMES, pages=st.integers(1, 6), virtual=st.sampled_from([0, 5, 40]))
    def add_adapter(self, name: str, pages: int, virtual: int) -> None:
        self.life.add_adapter(name, pages, virtual)

    @rule(name=NAMES)
    def remove_adapter(self, name: str) -> None:
        self.life.remove_adapter(name)

    @rule(lengths=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=3), max_size=3))
    def start_job(self, lengths: list[list[int]]) -> None:
        self.life.start_job(lengths)

    @rule(place=st.integers(0, 10), how=st.sampled_from(["pause", "resume", "cancel"]))
    def change_job(self, place: int, how: str) -> None:
        self.life.change_job(place, how)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.life.step()

    @rule()
    def fail(self) -> None:
        self.life.fail()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.finish(STEPS)


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def longest_waits(policy: str) -> dict[str, int]:
    """Steps of the request that took longest, where one tenant asks for more than can be served.

    A batch has room for 16 of the 41 requests that come in 20 steps; one of these is the other's.
    """
    life = EngineLife(policy, pages=60, promises=False)
    longest = {"greedy": 0, "modest": 0}
    came: dict[str, tuple[str, int]] = {}
    for step in range(1500):
        for tenant in ["greedy"] * 40 + ["modest"] if step % 20 == 0 else []:
            life.submit(30, 10, None, tenant, None)
            came[list(life.wanted)[-1]] = tenant, step
        before = set(life.wanted)
        life.step()
        for name in before - set(life.wanted):
            tenant, since = came.pop(name)
            longest[tenant] = max(longest[tenant], step - since)
    for tenant, since in came.values():
        longest[tenant] = max(longest[tenant], 1500 - since)
    return longest


@pytest.mark.slow
def test_fair_share_starves_nobody() -> None:
    fair, first = longest_waits("fair share"), longest_waits("fcfs")
    assert fair["modest"] <= 40
    assert fair["greedy"] > 500
    assert first["modest"] > 500

"""What prompts may add to a step, and whose turn it is to read one, in simulated time."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.errors import GenerationError, ServeError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.serve.engine.options import ServeOptions
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts

CPU = LinearCosts(layers=30, constant_s=0.017, token_s=6e-4, key_s=9e-7)
"""SmolLM2-135M on a core, by `benchmarks/bench_long_prompts.py`."""
LONG = 4830


def ask(name: str, prompt: int, new: int = 1, priority: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request((1,) * prompt, params, request_id=name, priority=priority)


def make_engine(costs: LinearCosts = CPU, **limits: float) -> SimulatedEngine:
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
    engine = make_engine(costs, prompt_stretch=stretch)
    streaming(engine)
    for place, length in enumerate(prompts):
        engine.submit(ask(f"long {place}", length))
    for _ in range(200):
        engine.step()
    found = gaps_beside(engine)
    assert max(found) <= 2.5 * stretch  # the first chunks are sized by the first guess
    assert max(found[4:], default=0.0) <= 1.3 * stretch


def test_a_long_prompt_holds_a_stream_as_long_as_the_default_says() -> None:
    engine = make_engine()
    streaming(engine)
    engine.submit(ask("long", LONG))
    took_s = first_token_s(engine, "long")
    assert max(gaps_beside(engine)) <= 1.1 * Limits().prompt_stretch
    # Steps beside it are a tenth of its own time.
    alone = make_engine(prompt_stretch=math.inf)
    alone.submit(ask("long", LONG))
    assert took_s <= 1.3 * first_token_s(alone, "long")


def test_without_a_bound_a_prompt_runs_whole() -> None:
    engine = make_engine(prompt_stretch=math.inf)
    engine.submit(ask("long", LONG))
    engine.step()
    assert times(engine, "long")
    bounded = make_engine()
    bounded.submit(ask("long", LONG))
    bounded.step()
    assert not times(bounded, "long")  # a newcomer waits for one chunk


@pytest.mark.parametrize("limits", [{"tokens": 1}, {"tokens": 8}, {"least_chunk": 128}])
def test_prompts_end_whatever_a_chunk_may_have(limits: dict[str, float]) -> None:
    engine = make_engine(**limits)
    engine.submit(ask("long", 200))
    first_token_s(engine, "long")


def test_a_suspect_runs_alone_in_chunks_that_steps_have_room_for() -> None:
    engine = make_engine(tokens=256)
    engine.submit(ask("long", LONG))
    engine.step()
    (sequence,) = engine.scheduler.running
    plan = engine.scheduler.plan_alone(sequence, engine.clock.latest_s())
    assert 0 < plan.tokens <= 256


@pytest.mark.parametrize("longs", [1, 12])
def test_a_short_request_has_its_turn_beside_long_prompts(longs: int) -> None:
    """It waits for a few steps, and not for the prompts before it, which take seconds each."""
    engine = make_engine()
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
    alone = make_engine()
    alone.submit(ask("long", LONG))
    alone_s = first_token_s(alone, "long")
    engine = make_engine(running=1000)
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
    engine = make_engine()
    engine.submit(ask("long", LONG, priority=0))
    engine.step()
    engine.submit(ask("short", 30, priority=1))
    engine.submit(ask("urgent", 30, priority=-1))
    first_token_s(engine, "urgent")
    assert not times(engine, "short")
    first_token_s(engine, "long")
    assert not times(engine, "short") or times(engine, "short") >= times(engine, "long")


def test_a_guess_from_a_step_that_compiled_kernels_is_made_again() -> None:
    """The first step takes five seconds, and those after it 20 ms."""
    engine = make_engine()
    engine.submit(ask("stream", 30, 100_000))
    start = engine.device.start

    def slow(*given: object) -> object:
        engine.clock.advance(5.0)
        engine.device.start = start  # type: ignore[method-assign]
        return start(*given)  # type: ignore[arg-type]

    engine.device.start = slow  # type: ignore[method-assign, assignment]
    streaming_after = 40
    while len(times(engine, "stream")) < streaming_after:
        engine.step()
    engine.submit(ask("long", LONG))
    first_token_s(engine, "long")
    gaps = [b - a for a, b in pairwise(times(engine, "stream"))][1:]
    assert max(gaps) <= 1.2 * Limits().prompt_stretch * statistics.median(gaps[:30])


@pytest.mark.parametrize("value", [1.0, 0, -2.0, math.nan])
def test_values_that_bound_nothing_are_refused(value: float) -> None:
    with pytest.raises(GenerationError, match=r"prompt_stretch=.*above 1"):
        Limits(prompt_stretch=value)
    with pytest.raises(ServeError, match=r"prompt_stretch=.*above 1"):
        ServeOptions(prompt_stretch=value)


def test_a_server_has_the_bound_of_its_option() -> None:
    limits = ServeOptions(prompt_stretch=3.0).engine(1).limits
    assert limits is not None
    assert limits.prompt_stretch == 3.0

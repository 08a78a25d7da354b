"""Rules of sharing: tokens and adapters are the same under each, and each gives what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pcg.errors import FinetuneError
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.sharing import (
    CoServing,
    InferenceOnly,
    Sharing,
    SpatialSharing,
    Step,
    TemporalSharing,
)
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.model.load import Load
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.work_units import Forward, Part, Phase
from pcg.simulate.simulated_training import SimulatedPass
from tests.support.certain import certain
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    OPTIONS,
    expected,
    make_executor,
    requests,
    serve,
)


def engine_of(executor: Executor, sharing: Sharing) -> Engine:
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    return executor.engine(
        Limits(tokens=64, least_chunk=4),
        kv_cache_bytes=64 * page_bytes,
        latencies=Latencies(Latency(2e-3, 1e-4, 1e-7), Latency(5e-4, 5e-5, 1e-7)),
        sharing=sharing,
    )


@pytest.mark.parametrize(
    "sharing",
    [CoServing(), TemporalSharing(1), TemporalSharing(5), SpatialSharing(0.3), SpatialSharing(0.9)],
    ids=lambda rule: type(rule).__name__,
)
def test_tokens_and_adapters_are_those_of_each_alone(sharing: Sharing) -> None:
    executor, alone = make_executor(), make_executor()
    alone.finetune(DATA, "trained", peft=LORA, progress=False, **OPTIONS)
    engine = engine_of(executor, sharing)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    asked = requests(executor, LENGTHS)
    assert [list(c.token_ids) for c in serve(engine, asked, 3)] == expected(asked)
    assert job.error is None
    assert job.result.steps == 3
    ours, theirs = (e.adapters["trained"].tensors for e in (executor, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_temporal_sharing_trains_a_mini_batch_after_so_many_steps() -> None:
    """The log of a run under load: a finetuning step after every fourth that served."""
    executor = make_executor()
    engine = engine_of(executor, TemporalSharing(4))
    for request in requests(executor, (9, 4, 37)):
        engine.submit(request)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    steps: list[str] = []
    while engine.scheduler.waiting or engine.scheduler.running:
        served = bool(engine.step())
        trained = sum(event.kind is Kind.STEPPED for event in engine.log)
        steps.append(f"{'serves' if served else 'trains'} {trained}")
    assert steps[:10] == [*["serves 0"] * 4, "trains 1", *["serves 1"] * 4, "trains 2"]
    assert job.result is not None


def test_inference_only_leaves_jobs_where_they_are() -> None:
    executor = make_executor()
    engine = engine_of(executor, InferenceOnly())
    asked = requests(executor, LENGTHS)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    assert [list(c.token_ids) for c in serve(engine, asked)] == expected(asked)
    assert engine.is_idle
    assert not job.is_over
    assert job.tokens == 0
    engine.sharing = CoServing()
    while not engine.is_idle:
        engine.step()
    assert job.result.steps == 3


class WithoutContext(SimulatedPass):
    """A pass whose next token always seems to be the first of its sequence."""

    @property
    def context(self) -> int:
        return 0


def unit_of(tokens: int) -> Forward:
    """So many tokens behind no context."""
    return Forward(WithoutContext([tokens], layers=2, adapter=None, rank=1))


def step_of(tokens: int) -> Step:
    """A step that serves so many tokens, of 1 ms each; a unit's tokens take 2 ms each."""
    latencies = certain(Latency(0.0, 1e-3, 0.0), Latency(0.0, 2e-3, 0.0))
    limits, load = Limits(tokens=1000, least_chunk=4), Load(tokens, sampled=tokens)
    return Step(limits, latencies, 0.05, 0.05, decoded=load, load=load, is_served=tokens > 0)


def test_spatial_sharing_gives_a_part_of_the_time() -> None:
    """Over steps of 10 ms, a third of the time is 5 ms for each, whatever the order of the work."""
    rule = SpatialSharing(1 / 3)
    trained_s = 0.0
    for number in range(400):
        step = step_of(10)
        rule.begin(step)
        if number % 2:
            trained_s += 1e-3 * rule.forward(step, unit_of(1000))
        load = Load(3)
        elapsed_s = 0.01
        while rule.fits(step, Phase.BACKWARD, load, elapsed_s):
            rule.ran(step, 6e-3)
            elapsed_s, trained_s = elapsed_s + 6e-3, trained_s + 6e-3
    assert trained_s == pytest.approx(400 * 5e-3, rel=0.01)


def test_co_serving_keeps_to_the_promise() -> None:
    """Of 50 ms, 10 go to requests: 40 tokens fit, and units of 2 ms a token while there is time."""
    rule, step = CoServing(burst=1), step_of(10)
    assert 4 <= rule.forward(step, unit_of(1000)) <= 40
    assert rule.forward(step_of(30), unit_of(1000)) <= 20
    assert rule.fits(step, Phase.BACKWARD, Load(12), 0.02)
    assert not rule.fits(step, Phase.BACKWARD, Load(12), 0.03)
    full = step_of(50)
    assert rule.forward(full, unit_of(1000)) == 0


@pytest.mark.parametrize(
    "rule", [CoServing(), SpatialSharing(0.5)], ids=lambda rule: type(rule).__name__
)
def test_a_job_goes_on_where_a_window_takes_longer_than_a_step_may(rule: Sharing) -> None:
    """A pass over the model takes 1 s, and an idle step may take 0.2; with requests 0.05."""
    latencies = Latencies(Latency(1.0, 1e-3, 0.0), Latency(1.0, 2e-3, 0.0))
    idle = Step(Limits(least_chunk=4), latencies)
    rule.begin(idle)
    unit = unit_of(6)
    assert rule.forward(idle, unit) == 4
    idle.load += Load(4, windows=1)
    assert rule.forward(idle, unit) == 0
    assert rule.fits(Step(Limits(), latencies), Phase.BACKWARD, Load(4), 0.0)
    served = Step(Limits(least_chunk=4), latencies, 0.05, 0.05, Load(1), is_served=True)
    assert CoServing().forward(served, unit) == 0


def window_step(slack_s: float, awaits_first_token: bool = False) -> Step:
    """A step of 10 tokens, promised 50 ms, where a window takes 10 ms beside 1 ms a token."""
    forward = Latency(0.0, 1e-3, 0.0, window_s=0.01)
    latencies, load = certain(forward, Latency(1e-3, 1e-4, 0.0)), Load(10, sampled=10)
    return Step(Limits(), latencies, 0.05, 0.05, slack_s, load, load, True, awaits_first_token)


def test_a_step_uses_slack_that_others_saved_up_to_its_burst() -> None:
    """Of 200 ms, 10 are the requests' and 10 the window's; while one waits, of 50 ms."""
    assert CoServing(burst=4).forward(window_step(1.0), unit_of(180)) == 180
    assert CoServing(burst=1.01).forward(window_step(1.0), unit_of(180)) == 30
    rule = CoServing(burst=4)
    awaited = [rule.forward(window_step(1.0, True), unit_of(180)) for _ in range(40)]
    assert {*awaited} == {0, 30}
    assert rule.fits(window_step(1.0), Phase.BACKWARD, Load(10), 0.19)
    assert not rule.fits(window_step(1.0, True), Phase.BACKWARD, Load(10), 0.049)


def test_a_batch_is_split_evenly() -> None:
    """Rooms of 180 and 30 tokens take as many windows as they must, and no tiny last one."""
    for burst, remaining, sizes in (
        (4, 200, [100, 100]),
        (1.01, 100, [25] * 4),
        (1.01, 31, [16, 15]),
    ):
        rule, unit = CoServing(burst), unit_of(remaining)
        found = []
        while unit.remaining:
            found.append(rule.forward(window_step(1.0), unit))
            unit.run(found[-1])
        assert found == sizes


def test_where_gaps_are_promised_a_window_goes_forward_as_it_costs_less() -> None:
    """Of 50 ms, 40 are left: for 30 tokens at once, or any number in layers of 0.5 + 0.05 ms."""
    rule, unit = CoServing(), unit_of(180)
    for _ in range(20):
        rule.begin(replace(window_step(1.0), spent_s=0.05, trained_s=0.04))
    assert rule.forward(window_step(1.0), unit) == 0
    assert 60 <= rule.in_layers(window_step(1.0), unit, 0.01) <= 180
    assert rule.in_layers(window_step(1.0), unit, 0.0496) == 0
    assert CoServing(burst=4).in_layers(window_step(1.0), unit, 0.01) == 0
    # Beside what is served, a token takes 0.05 ms; by itself, 0.1.
    step = window_step(1.0)
    step.latencies = certain(Latency(0.01, 5e-5, 0.0), Latency(1e-3, 1e-4, 0.0))
    rule = CoServing()
    for _ in range(20):
        rule.begin(replace(step, spent_s=0.05, trained_s=0.04))
    assert rule.in_layers(step, unit, 0.01) == 0
    assert 60 <= rule.forward(step, unit) <= 180


def test_a_step_has_as_much_of_the_loss_as_fits() -> None:
    """Of 50 ms, 20 are left; a token takes 1 ms."""
    forward, backward = Latency(0.0, 1e-3, 0.0), Latency(1e-3, 1e-4, 0.0)
    latencies = certain(forward, backward, Latency(2e-3, 1e-3, 0.0))
    step = Step(Limits(), latencies, 0.05, 0.05, 0.05, Load(10), Load(10), is_served=True)
    whole = WithoutContext([180], layers=2, adapter=None, rank=1)
    whole.forward(180)
    rule, part = CoServing(), Part(whole)
    assert rule.part(step, part, Load(), 0.03) == 18
    assert rule.part(step, part, Load(), 0.048) == 0
    whole.run_part(175)
    assert rule.part(step, part, Load(), 0.03) == 5
    # Once it is known that steps leave 40 ms, one with 10 takes none: most of it is the constant.
    whole = WithoutContext([180], layers=2, adapter=None, rank=1)
    whole.forward(180)
    for _ in range(2):
        rule.begin(step)
    assert rule.part(step, Part(whole), Load(), 0.04) == 0
    assert rule.part(step, Part(whole), Load(), 0.03) == 18


def test_windows_wait_for_slack_and_come_without() -> None:
    """While rooms grow the window waits for a large one; where they stay small it comes soon."""
    rule = CoServing(burst=4)
    grown = [rule.forward(window_step(0.05 + 0.02 * i), unit_of(1000)) for i in range(5)]
    # Of a window of 100 tokens 0.91 is theirs, and 0.93 · 0.97 is demanded by then.
    assert grown == [0, 0, 0, 0, 100]
    rule = CoServing(burst=4)
    same = [rule.forward(window_step(0.0305), unit_of(1000)) for _ in range(200)]
    # Once it is known that no more comes of waiting, every few steps take one.
    assert {*same} == {0, 10}
    assert same.index(10) < 40
    assert same[100:].count(10) >= 25


def test_what_cannot_be_shared() -> None:
    with pytest.raises(FinetuneError, match="frequency=0; use at least 1"):
        TemporalSharing(0)
    with pytest.raises(FinetuneError, match=r"burst=0\.5; use at least 1, the TPOT SLO"):
        CoServing(0.5)
    with pytest.raises(FinetuneError, match="share=1; use a part above 0 and below 1"):
        SpatialSharing(1)


def test_a_default_engine_trains_while_it_serves() -> None:
    """Nothing is promised or measured, and two requests are always running."""
    executor = make_executor()
    engine = executor.engine(kv_cache_bytes=2**20)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    steps = 0
    while not job.is_over and steps < 400:
        while len(engine.scheduler.waiting) + len(engine.scheduler.running) < 2:
            params = SamplingParams(max_new_tokens=30 + engine.submitted % 2, ignore_eos=True)
            engine.submit(Request((1, 2, 3), params))
        engine.step()
        steps += 1
    assert job.result.steps == 3
    tokens = sum(event.kind is Kind.TOKEN for event in engine.log)
    assert tokens >= 2 * steps - 2  # no step leaves the requests out

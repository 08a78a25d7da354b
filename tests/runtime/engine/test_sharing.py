"""Rules of sharing: tokens and adapters are the same under each, and each gives what it says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pcg.errors import FinetuneError
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.engine.scheduling.co_serving import CoServing, RecentRooms
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.step import Load
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.work_units import Forward, Part, Phase
from pcg.simulate.flexllm import InferenceOnly, SpatialSharing, TemporalSharing
from pcg.simulate.simulated_device import SimulatedPass
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


def step_of(tokens: int) -> Work:
    """A step that serves so many tokens, of 1 ms each; a unit's tokens take 2 ms each."""
    latencies = certain(Latency(0.0, 1e-3, 0.0), Latency(0.0, 2e-3, 0.0))
    limits, load = Limits(tokens=1000, least_chunk=4), Load(tokens, sampled=tokens)
    is_served = tokens > 0
    gap_s = 0.05 if is_served else math.inf
    return Work(limits, latencies, gap_s, load, load, load, is_served)


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
    rule, step = CoServing(), step_of(10)
    assert rule.in_layers(step, unit_of(1000), 0.01, is_due=False) <= 40
    assert rule.fits(step, Phase.BACKWARD, Load(12), 0.02)
    assert not rule.fits(step, Phase.BACKWARD, Load(12), 0.03)
    full = step_of(50)
    assert rule.forward(full, unit_of(1000)) == 0
    assert rule.in_layers(full, unit_of(1000), 0.05, is_due=False) == 0


def test_a_job_that_waited_for_long_runs_its_smallest_piece() -> None:
    """Also where the requests leave no time at all, but only the first piece of a step."""
    rule, full = CoServing(), step_of(50)
    assert rule.in_layers(full, unit_of(1000), 0.05, is_due=True) == 4
    assert rule.fits(full, Phase.BACKWARD, Load(12), 0.05, is_due=True)
    full.units = 1
    assert not rule.fits(full, Phase.BACKWARD, Load(12), 0.05, is_due=True)


@pytest.mark.parametrize(
    "rule", [CoServing(), SpatialSharing(0.5)], ids=lambda rule: type(rule).__name__
)
def test_a_job_goes_on_where_a_window_takes_longer_than_a_step_may(rule: Sharing) -> None:
    """A pass over the model takes 1 s, and an idle step may take 0.2; with requests 0.05."""
    latencies = Latencies(Latency(1.0, 1e-3, 0.0), Latency(1.0, 2e-3, 0.0))
    idle = Work(Limits(least_chunk=4), latencies)
    rule.begin(idle)
    unit = unit_of(6)
    assert rule.forward(idle, unit) == 4
    assert rule.fits(Work(Limits(), latencies), Phase.BACKWARD, Load(4), 0.0)
    served = Work(Limits(least_chunk=4), latencies, 0.05, *[Load(1)] * 3, is_served=True)
    assert CoServing().forward(served, unit) == 0


def window_step() -> Work:
    """A step of 10 tokens, promised 50 ms, where a window takes 10 ms beside 1 ms a token."""
    forward = Latency(0.0, 1e-3, 0.0, window_s=0.01)
    latencies, load = certain(forward, Latency(1e-3, 1e-4, 0.0)), Load(10, sampled=10)
    return Work(Limits(), latencies, 0.05, load, load, load, is_served=True)


def seen(rule: CoServing, step: Callable[[], Work], count: int = 20) -> CoServing:
    """Return a rule that has seen so many steps whose room was used."""
    for _ in range(count):
        one = step()
        rule.begin(one)
        one.spent_s = one.lasted_s = 0.05
        one.trained_s = 0.04
    rule.begin(step())
    return rule


def cheap_step() -> Work:
    """A step in which a token takes 0.05 ms beside what is served; by itself, 0.1."""
    step = window_step()
    step.latencies = certain(Latency(0.01, 5e-5, 0.0), Latency(1e-3, 1e-4, 0.0))
    return step


@pytest.mark.parametrize("remaining", [16, 31, 100, 200, 777])
def test_a_batch_is_split_into_windows_of_few_sizes(remaining: int) -> None:
    """A step of 90 tokens has 80 for a window; the last one has what is left."""
    rule, unit, found = seen(CoServing(), cheap_step), unit_of(remaining), []
    while unit.remaining:
        step = cheap_step()
        step.limits = Limits(tokens=90)
        found.append(rule.forward(step, unit))
        unit.run(found[-1])
    assert sum(found) == remaining
    assert all(size % 16 == 0 for size in found[:-1])
    assert len(set(found[:-1])) <= 2
    assert max(found) <= 80


def test_a_window_goes_forward_as_it_costs_less() -> None:
    """Of 50 ms, 40 are left: for 30 tokens at once, or any number in layers of 0.5 + 0.05 ms."""
    unit = unit_of(180)
    rule = seen(CoServing(), window_step)
    assert rule.forward(window_step(), unit) == 0
    assert 60 <= rule.in_layers(window_step(), unit, 0.01, is_due=False) <= 180
    assert rule.in_layers(window_step(), unit, 0.0496, is_due=False) == 0

    rule = seen(CoServing(), cheap_step)
    assert rule.in_layers(cheap_step(), unit, 0.01, is_due=False) == 0
    assert 60 <= rule.forward(cheap_step(), unit) <= 180


def test_a_step_has_as_much_of_the_loss_as_fits() -> None:
    """A token takes 1 ms, and all of them 2 ms: of less than that no token runs."""
    forward, backward = Latency(0.0, 1e-3, 0.0), Latency(1e-3, 1e-4, 0.0)
    latencies = certain(forward, backward, Latency(2e-3, 1e-3, 0.0))
    step = Work(Limits(), latencies, 0.05, *[Load(10)] * 3, is_served=True)
    whole = WithoutContext([180], layers=2, adapter=None, rank=1)
    whole.forward(180)
    rule, part = CoServing(), Part(whole)
    assert rule.part(step, part, Load(), 0.03, is_due=False) == 16
    assert rule.part(step, part, Load(), 0.04, is_due=False) == 8
    assert rule.part(step, part, Load(), 0.047, is_due=False) == 0
    assert rule.part(step, part, Load(), 0.047, is_due=True) == 16
    whole.run_part(175)
    assert rule.part(step, part, Load(), 0.03, is_due=False) == 5


def test_serving_keeps_its_share_of_the_time() -> None:
    """Beside steps of 10 ms with a promise of 50, a share of 0.5 leaves 10 ms to finetuning."""
    spent_s = {}
    for share in (0.0, 0.5, 0.8):
        rule, trained_s = CoServing(), 0.0
        for _ in range(200):
            step = step_of(10)
            step.limits = Limits(tokens=1000, least_chunk=4, serving_share=share)
            rule.begin(step)
            ahead_s = 0.01
            while rule.fits(step, Phase.BACKWARD, Load(1), ahead_s):
                rule.ran(step, 2e-3)
                trained_s, ahead_s = trained_s + 2e-3, ahead_s + 2e-3
        spent_s[share] = trained_s / 200
    assert spent_s == pytest.approx({0.0: 0.04, 0.5: 0.01, 0.8: 0.0025}, rel=0.06)


def test_what_cannot_be_shared() -> None:
    with pytest.raises(FinetuneError, match="frequency=0; use at least 1"):
        TemporalSharing(0)
    with pytest.raises(FinetuneError, match="share=1; use a part above 0 and below 1"):
        SpatialSharing(1)


def test_a_step_that_failed_has_no_room() -> None:
    """It took no time; where it is the only step, a window's length goes by the planned room."""
    rooms = RecentRooms()
    rooms.next_s = 0.5
    rooms.add(step_of(10), room_s=1.0)
    assert rooms.pieces(0.1) == 5


def test_a_default_engine_trains_while_it_serves() -> None:
    """Nothing is promised or measured, and two requests are always running."""
    executor = make_executor()
    engine = executor.engine(kv_cache_bytes=2**20)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    steps = 0
    while not job.is_over:
        while len(engine.scheduler.waiting) + len(engine.scheduler.running) < 2:
            params = SamplingParams(max_new_tokens=30 + engine.submitted % 2, ignore_eos=True)
            engine.submit(Request((1, 2, 3), params))
        engine.step()
        steps += 1
    assert job.result.steps == 3
    tokens = sum(event.kind is Kind.TOKEN for event in engine.log)
    assert tokens >= 2 * steps - 2  # no step leaves the requests out


def test_a_job_says_how_it_goes_on_and_what_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beside a stream whose promise no step keeps; then alone, until its end."""
    executor = make_executor()
    forward, backward = Latency(2e-3, 1e-4, 1e-7), Latency(5e-4, 5e-5, 1e-7)
    limits = Limits(tokens=64, least_chunk=4, tpot_slo_s=1e-3)
    # The predictions stay, however fast the machine is.
    with caplog.at_level("INFO", "pcg.engine"), patch.object(Latency, "observe"):
        engine = executor.engine(
            limits, kv_cache_bytes=2**21, latencies=Latencies(forward, backward)
        )
        engine.submit(Request((1, 2, 3), SamplingParams(max_new_tokens=100, ignore_eos=True)))
        engine.step()
        handle = RunningJob("trained", thread_of(engine))
        handle.begin(engine.finetune(DATA, "trained", peft=LORA, **OPTIONS))
        while not engine.is_idle:
            engine.step()
            if engine.scheduler.running:
                assert handle.status.waits is not None
                assert re.match(
                    r"no room within tpot_slo_s=0.001: .* takes \S+ s, \S+ s is left",
                    handle.status.waits,
                )
    assert "trains while nothing is served, and rarely beside requests" in caplog.text
    status = handle.status
    assert (status.step, status.state, status.waits) == (3, JobState.SUCCEEDED, None)
    assert status.tokens_per_second is not None
    assert 0 < status.time_share <= 1
    assert status.remaining_s is None


def thread_of(engine: Engine) -> Any:
    """A thread that runs its calls at once."""
    return SimpleNamespace(engine=engine, call=lambda act: act(), asked=lambda *_: nullcontext())


def test_a_job_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty steps, each so far has taken half a second."""
    executor = make_executor()
    engine = executor.engine(kv_cache_bytes=2**21)
    handle = RunningJob("trained", thread_of(engine))
    job = engine.finetune(DATA, "trained", peft=LORA, **{**OPTIONS, "max_steps": 20})
    handle.begin(job)
    while handle.status.step < 10:
        assert handle.status.state is not JobState.FAILED
        engine.step()
    steps, began_s = handle.status.step, job.began_s
    assert began_s is not None
    monkeypatch.setattr(engine.clock, "latest_s", lambda: began_s + 0.5 * steps)
    assert handle.status.remaining_s == pytest.approx(0.5 * (20 - steps))

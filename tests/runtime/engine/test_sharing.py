"""Rules of sharing: tokens and adapters are the same under each, and each gives what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pcg.errors import FinetuneError
from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.engine.scheduling import guest_work
from pcg.runtime.engine.scheduling.co_serving import CoServing
from pcg.runtime.engine.scheduling.guest_work import LEAST_ROWS, LEAST_SHARE, GuestWork, RowWork
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import ServingReport
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.distributions import Between, Fixed, Poisson
from pcg.simulate.flexllm import InferenceOnly, SpatialSharing, TemporalSharing
from pcg.simulate.replay import replay
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.synthetic import synthetic
from tests.support.linear_costs import certain
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    OPTIONS,
    check_trained,
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
    [
        CoServing(),
        pytest.param(TemporalSharing(1), marks=pytest.mark.slow),
        pytest.param(TemporalSharing(5), marks=pytest.mark.slow),
        SpatialSharing(0.3),
        pytest.param(SpatialSharing(0.9), marks=pytest.mark.slow),
    ],
    ids=["co-serving", "temporal-1", "temporal-5", "spatial-0.3", "spatial-0.9"],
)
def test_tokens_and_adapters_are_those_of_each_alone(sharing: Sharing) -> None:
    executor = make_executor()
    engine = engine_of(executor, sharing)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    asked = requests(executor, LENGTHS)
    assert [list(c.token_ids) for c in serve(engine, asked, 3)] == expected(asked)
    assert job.error is None
    assert job.result.steps == 3
    check_trained(executor)


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


def test_what_cannot_be_shared() -> None:
    with pytest.raises(FinetuneError, match="frequency=0; use at least 1"):
        TemporalSharing(0)
    with pytest.raises(FinetuneError, match="share=1; use a part above 0 and below 1"):
        SpatialSharing(1)


def test_a_job_says_how_it_goes_on_and_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
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


# --------------------------------------------------------------------- co-serving in simulated time

LAYERS = 8
PROMISED_S = 0.083


def exact() -> Latencies:
    """What the device takes, and known to be so."""
    forward = Latency(0.0154, 6.4e-4, 4e-7, 8e-4, 0.0, 1e-3)
    return certain(forward, Latency(0.0027, 1.1e-4, 1e-7), Latency(0.0005, 1e-3, 0.0))


class CpuCosts:
    """See `pcg.parallel.costs.step_costs.StepCosts`."""

    layers = LAYERS

    def step_seconds(self, shape: StepShape) -> float:
        of_window = 1e-3 * (shape.trained > 0)
        of_tokens = 6.4e-4 * shape.tokens + 4e-7 * shape.pairs
        return 0.0154 + of_tokens + 8e-4 * shape.sampled + of_window

    def layer_seconds(self, layer: int, shape: StepShape) -> float:
        return self.backward_seconds(layer, shape) / 2

    def loss_seconds(self, tokens: int) -> float:
        return 0.0005 + 1.0e-3 * tokens

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return 0.0027 + 1.1e-4 * shape.tokens + 1e-7 * shape.pairs

    def update_seconds(self) -> float:
        return 0.012

    def copy_seconds(self, size_bytes: int) -> float:
        return 0.0


class KnownCosts(CpuCosts):
    """Without what no latency foretells."""

    def update_seconds(self) -> float:
        return 0.0


def simulated(
    rule: Sharing, costs: CpuCosts, latencies: Latencies, promised_s: float = PROMISED_S
) -> SimulatedEngine:
    limits = Limits(running=32, ttft_slo_s=6.0, tpot_slo_s=promised_s)
    engine = SimulatedEngine(costs, 20_000, 1000, limits, latencies=latencies, sharing=rule)
    engine.finetune("trained", repeat((128, 128)))
    return engine


def replayed(engine: SimulatedEngine, rate_per_s: float, duration_s: float) -> ServingReport:
    """Prompts of 16 to 64 tokens, 32 new ones each."""
    lengths = Between(16, 64), Fixed(32)
    workload = synthetic(Poisson(rate_per_s), *lengths, seed=3, duration_s=duration_s)
    return replay(engine, workload, {}, 32_000, wait=engine.clock.advance)


RULES: dict[str, Callable[[], Sharing]] = {
    "co-serving": CoServing,
    **{f"temporal {n}": partial(TemporalSharing, n) for n in (32, 64, 128)},
    **{f"spatial {share}": partial(SpatialSharing, share) for share in (0.25, 0.5)},
}


@pytest.mark.parametrize("rate_per_s", [2.9, pytest.param(4.5, marks=pytest.mark.slow)])
def test_co_serving_trains_most_of_those_that_keep_as_many_gaps(rate_per_s: float) -> None:
    """The engine begins with latencies that know of no constants."""
    found = {}
    for name, rule in RULES.items():
        begun = Latency(0.0155, 7e-4, 4e-7, 4e-4, 2e-4, 0.004), Latency(0.002, 1.7e-4, 1e-7)
        engine = simulated(rule(), CpuCosts(), Latencies(*begun))
        found[name] = replayed(engine, rate_per_s, 60.0)
    own = found.pop("co-serving")
    assert own.gap_attainment is not None
    assert own.gap_attainment > 0.99
    others = [r.finetuning_throughput for r in found.values() if (r.gap_attainment or 0) >= 0.99]
    assert own.finetuning_throughput > max([*others, 120])


@given(
    promised_s=st.floats(0.03, 0.3),
    rate_per_s=st.floats(0.5, 8.0),
    most_tokens=st.integers(16, 400),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_gaps_are_kept_where_costs_are_known(
    promised_s: float, rate_per_s: float, most_tokens: int, seed: int
) -> None:
    """Beside long prompts and a job, and where more requests come than can be served."""
    engine = simulated(CoServing(), KnownCosts(), exact(), promised_s)
    lengths = Between(16, most_tokens), Between(2, 64)
    workload = synthetic(Poisson(rate_per_s), *lengths, seed=seed, duration_s=10.0)
    report = replay(engine, workload, {}, 32_000, wait=engine.clock.advance)
    gaps = [gap for one in report.requests for gap in one.itls_s]
    # A window over two sequences has fewer keys than are counted, so that estimates drift a little;
    # a job that waited for long takes half of the gaps that may be missed.
    assert sum(gap > 1.01 * promised_s for gap in gaps) <= 0.005 * len(gaps) + 1
    assert all(one.outcome == "finished" for one in report.requests)


class CountedCosts(CpuCosts):
    """Costs that count the time of requests apart from that of windows beside them."""

    served_s = 0.0

    def step_seconds(self, shape: StepShape) -> float:
        seconds = super().step_seconds(shape)
        of_windows_s = 1e-3 * (shape.trained > 0) + 6.4e-4 * shape.trained
        self.served_s += seconds - of_windows_s if shape.tokens > shape.trained else 0.0
        return seconds


def alone_s(lengths: Sequence[int]) -> float:
    """Return the time of a step of a job by itself, in windows of 16 tokens, the least."""
    costs, tokens = CpuCosts(), sum(lengths)
    windows, keys = -(-tokens // 16), sum(n * n // 2 for n in lengths)
    layer_s = windows * costs.backward_seconds(0, StepShape()) + 1.1e-4 * tokens + 1e-7 * keys
    return 1.5 * LAYERS * layer_s + costs.loss_seconds(tokens) + costs.update_seconds()


@given(
    promised=st.none() | st.floats(1.3, 10.0),
    rate_per_s=st.floats(0.0, 8.0),
    jobs=st.sampled_from([1, 3, 10]),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=12)
def test_every_job_completes_steps_in_the_time_that_serving_leaves(
    promised: float | None, rate_per_s: float, jobs: int, lengths: list[int], seed: int
) -> None:
    """Each of n jobs completes a step within 3 n times its time by itself, of the time left.

    A promise is relative to a step in which eight sequences decode.
    """
    costs, random, due_s = CountedCosts(), Random(seed), 0.0
    decode_s = CpuCosts().step_seconds(StepShape(tokens=8, sampled=8))
    promised_s = None if promised is None else promised * decode_s
    limits = Limits(running=8, tpot_slo_s=promised_s)
    engine = SimulatedEngine(costs, 60_000, 1000, limits, latencies=exact(), job_share=0.9)
    for i in range(jobs):
        engine.finetune(f"job {i}", repeat(lengths))
    needed_s, steps = 3 * jobs * alone_s(lengths), 0
    while engine.clock.now_s() - costs.served_s < needed_s and steps < 20_000:
        while rate_per_s and due_s <= engine.clock.now_s():
            params = SamplingParams(max_new_tokens=random.randrange(1, 64), ignore_eos=True)
            engine.submit(Request((1,) * random.randrange(1, 200), params))
            due_s += random.expovariate(rate_per_s)
        engine.step()
        steps += 1
    assume(steps < 20_000)  # requests leave nothing
    stepped = {event.subject for event in engine.log if event.kind is Kind.STEPPED}
    assert stepped == {job.name for job in engine.jobs}


def test_a_job_goes_on_where_requests_leave_nothing() -> None:
    """One piece in 200 steps, half of the gaps that may be missed."""
    limits = Limits(tpot_slo_s=0.018)  # a token of one request takes 17 ms
    engine = SimulatedEngine(CpuCosts(), 60_000, 1000, limits, latencies=exact())
    job = engine.finetune("job", repeat((16,)))
    engine.submit(Request((1,), SamplingParams(max_new_tokens=5000, ignore_eos=True)))
    taken = []
    for _ in range(2100):
        before = job.tokens
        engine.step()
        taken.append(job.tokens - before)
    assert sum(map(bool, taken)) == 10


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8])
def test_without_a_promise_finetuning_has_its_share(share: float) -> None:
    """Two requests always run; nothing was measured before the first step."""
    limits = Limits(running=32, finetuning_floor=share)
    engine = SimulatedEngine(CpuCosts(), 20_000, 1000, limits)
    engine.finetune("trained", repeat((128, 128)))
    params, longest_s = SamplingParams(max_new_tokens=50, ignore_eos=True), 0.0
    while engine.clock.now_s() < 40.0:
        while len(engine.scheduler.waiting) + len(engine.scheduler.running) < 2:
            engine.submit(Request((1,) * 40, params))
        started_s = engine.clock.now_s()
        engine.step()
        longest_s = max(longest_s, engine.clock.now_s() - started_s)
    output = sum(event.kind is Kind.TOKEN for event in engine.log) / engine.clock.now_s()
    assert output == pytest.approx(103.4 * (1 - share), rel=0.05)  # 103.4 by themselves
    trained = sum(event.kind is Kind.STEPPED for event in engine.log)
    assert trained >= 256 * share * 0.06  # alone, it takes 0.9 s a step
    assert longest_s < 0.7


@pytest.mark.parametrize("tpot_slo_s", [None, PROMISED_S])
def test_a_step_that_serves_nothing_ends_when_a_request_comes(tpot_slo_s: float | None) -> None:
    """However long it may last, a request waits for a part of it."""
    found = []
    for idle_step_s in (0.2, 5.0):
        limits = Limits(running=32, tpot_slo_s=tpot_slo_s, idle_step_s=idle_step_s)
        engine = SimulatedEngine(CpuCosts(), 20_000, 1000, limits, latencies=exact())
        engine.finetune("trained", repeat((128, 128)))
        report = replayed(engine, 0.5, 60.0)
        assert report.ttft is not None
        assert report.finetuning_throughput > 150
        found.append(report.ttft.p99_s)
    assert max(found) < 0.2


# ------------------------------------------------------------------------------------- guests' work

ROW_S = 1e-3


class GuestEngine:
    """An engine whose clock moves by the work that runs: a millisecond a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.row_s = ROW_S
        self.calls: list[Callable[[], Any]] = []
        self.is_idle = True
        self.is_awaited = False
        self.slices: list[tuple[int, int]] = []
        monkeypatch.setattr(guest_work.time, "perf_counter", lambda: self.now_s)
        self.guests = GuestWork(self.call, lambda: self.is_idle, lambda: self.is_awaited)

    def call(self, act: Callable[[], Any]) -> Future[Any]:
        self.calls.append(act)
        return Future()

    def run_calls(self) -> None:
        calls, self.calls = self.calls, []
        for act in calls:
            act()

    def work(self, rows: int) -> RowWork:
        def act(begin: int, end: int) -> None:
            self.slices.append((begin, end))
            self.now_s += self.row_s * (end - begin)

        return RowWork("piece", rows, act)


def serving_step(limits: Limits, gap_s: float | None) -> Work:
    """A step that serves, and promises a gap."""
    return Work(limits, None, gap_s or float("inf"), is_served=True)


def test_work_ends_within_the_time_that_an_slo_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits = GuestEngine(monkeypatch), Limits(tpot_slo_s=0.1)
    engine.is_idle = False
    work = engine.work(1000)
    done = engine.guests.submit(work)
    for _ in range(40):
        step, before_s = serving_step(limits, 0.1), engine.now_s
        engine.guests.run(step, ahead_s=0.03)
        took_s = engine.now_s - before_s
        assert took_s == pytest.approx(step.elapsed_s)
        assert took_s <= 0.07
        step.ran_forward(0.03, is_replayed=False)
    assert done.done()
    # Each row ran once, in their order.
    assert [begin for begin, _ in engine.slices] == [0, *(end for _, end in engine.slices)][:-1]
    assert engine.slices[-1][1] == 1000


@pytest.mark.parametrize("slo_s", [None, 0.01, 0.1])
@pytest.mark.parametrize("served_s", [0.02, 0.1, 5.0])
@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.1])
def test_work_that_waits_has_a_least_share_whatever_was_promised(
    monkeypatch: pytest.MonkeyPatch, slo_s: float | None, served_s: float, row_s: float
) -> None:
    """Steps that miss their SLO, prompts that take longer than a step may, and slow rows."""
    engine, limits = GuestEngine(monkeypatch), Limits(tpot_slo_s=slo_s, finetuning_floor=0.0)
    engine.is_idle, engine.row_s = False, row_s
    engine.guests.times.observe("piece", LEAST_ROWS, LEAST_ROWS * row_s)
    engine.guests.submit(engine.work(10**7))
    all_s, longest_s, steps = 0.0, 0.0, 200 + int(200 * LEAST_ROWS * row_s / served_s)
    for _ in range(steps):
        step, before_s = serving_step(limits, slo_s), engine.now_s
        engine.guests.run(step, ahead_s=served_s)
        longest_s = max(longest_s, engine.now_s - before_s)
        step.ran_forward(served_s, is_replayed=False)
        all_s += engine.now_s - before_s + served_s
    slice_s = LEAST_ROWS * row_s  # rows are not cut further, so that one slice may be owed
    assert engine.now_s >= 0.9 * LEAST_SHARE * all_s - slice_s
    if slo_s is not None and served_s >= slo_s:  # and not more than that, nor at once
        assert engine.now_s <= 1.1 * LEAST_SHARE * all_s + longest_s
        assert longest_s <= LEAST_SHARE / (1 - LEAST_SHARE) * served_s + 2 * LEAST_ROWS * row_s


def test_work_that_fails_is_the_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GuestEngine(monkeypatch)

    def fail(begin: int, end: int) -> None:
        raise ValueError("no such rows")

    failed = engine.guests.submit(RowWork("piece", 4, fail))
    done = engine.guests.submit(engine.work(4))
    engine.run_calls()
    assert isinstance(failed.exception(), ValueError)
    assert done.done()
    assert engine.slices == [(0, 4)]

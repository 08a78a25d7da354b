"""Co-serving in simulated time, on a device where a window takes much for itself.

Its costs are those of an 8-layer Llama of hidden size 512 on a CPU, as they were measured: each
layer goes back in 2.7 ms before any token, and the loss of a token takes 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.sharing import CoServing, Sharing, SpatialSharing, TemporalSharing
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.engine.sharing.time_account import TimeAccount
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.metrics import ServingReport
from pcg.runtime.model.load import Load
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.replay import replay
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.workloads.arrivals import Poisson
from pcg.simulate.workloads.lengths import Between, Fixed
from pcg.simulate.workloads.synthetic import synthetic
from tests.support.certain import certain

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


def engine_of(
    rule: Sharing, costs: CpuCosts, latencies: Latencies, promised_s: float = PROMISED_S
) -> SimulatedEngine:
    limits = Limits(running=32, ttft_slo_s=6.0, tpot_slo_s=promised_s)
    engine = SimulatedEngine(costs, 20_000, 1000, limits, latencies=latencies, sharing=rule)
    engine.finetune("trained", repeat((128, 128)))
    return engine


def served(engine: SimulatedEngine, rate_per_s: float, duration_s: float) -> ServingReport:
    """Prompts of 16 to 64 tokens, 32 new ones each."""
    lengths = Between(16, 64), Fixed(32)
    workload = synthetic(Poisson(rate_per_s), *lengths, seed=3, duration_s=duration_s)
    return replay(engine, workload, {}, 32_000, wait=engine.clock.advance)


RULES: dict[str, Callable[[], Sharing]] = {
    "co-serving": partial(CoServing, 4),
    **{f"temporal {n}": partial(TemporalSharing, n) for n in (32, 64, 128)},
    **{f"spatial {share}": partial(SpatialSharing, share) for share in (0.25, 0.5)},
}


@pytest.mark.parametrize("rate_per_s", [2.9, 4.5])
def test_co_serving_trains_most_of_those_that_attain_as_much(rate_per_s: float) -> None:
    """By the means of requests; the engine begins with latencies that know of no constants."""
    found = {}
    for name, rule in RULES.items():
        begun = Latency(0.0155, 7e-4, 4e-7, 4e-4, 2e-4, 0.004), Latency(0.002, 1.7e-4, 1e-7)
        engine = engine_of(rule(), CpuCosts(), Latencies(*begun))
        found[name] = served(engine, rate_per_s, 60.0)
    own = found.pop("co-serving")
    assert own.slo_attainment == 1.0
    others = [r.finetuning_throughput for r in found.values() if r.slo_attainment == 1.0]
    assert len(others) >= 2
    assert own.finetuning_throughput > max(others)
    # It is hardly more than what it trains where no gap is longer than promised.
    within = served(engine_of(CoServing(), CpuCosts(), Latencies(*begun)), rate_per_s, 60.0)
    assert within.finetuning_throughput > 0.85 * own.finetuning_throughput > 120
    assert own.gap_attainment is not None
    assert within.gap_attainment is not None
    assert own.gap_attainment < 0.9 < 0.999 <= within.gap_attainment


@given(
    promised_s=st.floats(0.03, 0.3),
    rate_per_s=st.floats(0.5, 8.0),
    most_tokens=st.integers(16, 400),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_no_gap_exceeds_the_promise_where_costs_are_known(
    promised_s: float, rate_per_s: float, most_tokens: int, seed: int
) -> None:
    """Beside long prompts and a job, and where more requests come than can be served."""
    engine = engine_of(CoServing(), KnownCosts(), exact(), promised_s)
    lengths = Between(16, most_tokens), Between(2, 64)
    workload = synthetic(Poisson(rate_per_s), *lengths, seed=seed, duration_s=10.0)
    report = replay(engine, workload, {}, 32_000, wait=engine.clock.advance)
    gaps = [gap for one in report.requests for gap in one.itls_s]
    # A window over two sequences has fewer keys than are counted, so that estimates drift a little.
    assert max(gaps, default=0.0) <= 1.01 * promised_s
    assert all(one.outcome == "finished" for one in report.requests)


@pytest.mark.parametrize("burst", [1, 3])
def test_no_step_is_longer_than_its_burst(burst: int) -> None:
    """With latencies that are the device's: steps that wait for a first token, one promise."""
    engine = engine_of(CoServing(burst), KnownCosts(), exact())
    took: dict[bool, list[float]] = {True: [], False: []}
    step = engine.step

    def timed() -> object:
        scheduler, started_s = engine.scheduler, engine.clock.now_s()
        is_promised = any(one.first_token_s is not None for one in scheduler.running)
        awaits_first_token, trained = bool(scheduler.waiting), engine.jobs[0].tokens
        chunks = step()
        if is_promised and engine.jobs[0].tokens > trained:
            took[awaits_first_token].append(engine.clock.now_s() - started_s)
        return chunks

    engine.step = timed  # type: ignore[method-assign, assignment]
    report = served(engine, 2.9, 30.0)
    assert report.slo_attainment == 1.0
    # A window over two sequences has fewer keys than are counted.
    assert max(took[False]) <= burst * PROMISED_S * 1.001
    assert max(took[True]) <= PROMISED_S * 1.001
    assert max(took[False]) > (0.95 if burst == 1 else 0.5 * burst) * PROMISED_S
    assert report.finetuning_throughput > 160


def test_windows_come_where_requests_wait_all_the_time() -> None:
    """More come than are served, so that hardly a step may be longer than promised."""
    found = []
    for burst in (1, 4):
        engine = engine_of(CoServing(burst), CpuCosts(), exact())
        found.append(served(engine, 10.0, 40.0))
    within, bursting = found
    assert within.slo_attainment is not None
    assert bursting.slo_attainment is not None
    assert bursting.slo_attainment >= within.slo_attainment > 0.7
    assert bursting.finetuning_throughput >= 0.8 * within.finetuning_throughput > 20


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8])
def test_without_a_promise_finetuning_has_its_share(share: float) -> None:
    """Two requests always run; nothing was measured before the first step."""
    limits = Limits(running=32, finetuning_share=share)
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


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_without_a_promise_the_share_bounds_each_step(share: float) -> None:
    """Eight jobs of long sequences beside requests that decode: no part of them is a long step."""
    engine = SimulatedEngine(CpuCosts(), 20_000, 1000, Limits(finetuning_share=share))
    for number in range(8):
        engine.finetune(f"job {number}", repeat((512,)))
    engine.submit(Request((1,) * 8, SamplingParams(max_new_tokens=1000, ignore_eos=True)))
    took = []
    for _ in range(800):
        started_s = engine.clock.now_s()
        engine.step()
        took.append(engine.clock.now_s() - started_s)
    own_s, took = 0.0169, sorted(took[50:])
    update_s = CpuCosts().update_seconds()
    earned_s = 1.25 * share / (1 - share) * own_s
    least_s = CpuCosts().backward_seconds(0, StepShape(tokens=16))
    assert took[len(took) // 2] > own_s
    assert took[int(0.9 * len(took))] <= own_s + max(earned_s, least_s) + 2e-3
    assert took[-1] <= own_s + max(earned_s, least_s) + update_s + 2e-3


@pytest.mark.parametrize("tpot_slo_s", [None, PROMISED_S])
def test_a_step_that_serves_nothing_ends_when_a_request_comes(tpot_slo_s: float | None) -> None:
    """However long it may last, a request waits for a part of it."""
    found = []
    for idle_step_s in (0.2, 5.0):
        limits = Limits(running=32, tpot_slo_s=tpot_slo_s, idle_step_s=idle_step_s)
        engine = SimulatedEngine(CpuCosts(), 20_000, 1000, limits, latencies=exact())
        engine.finetune("trained", repeat((128, 128)))
        report = served(engine, 0.5, 60.0)
        assert report.ttft is not None
        assert report.finetuning_throughput > 150
        found.append(report.ttft.p99_s)
    assert max(found) < 0.2


def test_saved_time_makes_no_long_step() -> None:
    """A step has what it earns, whatever was saved, or one part that is as short as can be."""
    account, limits = TimeAccount(), Limits(idle_step_s=1.0)
    step = Step(limits, exact(), load=Load(1, 20, 1), is_served=True)
    assert step.latencies is not None
    earned_s = step.latencies.forward.seconds(step.load)

    def units(seconds: float, least_s: float = 0.0) -> int:
        account.begin(step, 0.5)
        count = 0
        while account.affords(seconds, least_s):
            account.spend(seconds)
            count += 1
        return count

    for _ in range(40):
        account.begin(step, 0.5)
    assert [units(3 * earned_s) for _ in range(3)] == [0, 0, 0]
    assert [units(3 * earned_s, least_s=3 * earned_s) for _ in range(3)] == [1, 1, 1]
    assert [units(earned_s / 4) for _ in range(3)] == [5, 5, 5]

"""Steady states against closed forms, and against the engine itself in simulated time."""

from __future__ import annotations

from itertools import repeat

import pytest

from pcg.plan.loads import CoServing, Load, Served, ServingSteps, interpolated
from pcg.plan.workload import Serving, Training
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report
from pcg.simulate.distributions import Fixed, Poisson
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import synthetic
from tests.support.linear_costs import LinearCosts

COSTS = LinearCosts(layers=4, constant_s=0.002, token_s=5e-5, key_s=1e-8)
PROMPT, OUTPUT = 100, 200


def steps(costs: LinearCosts = COSTS, prompt: int = PROMPT, running: int = 256) -> ServingSteps:
    served = Served(Serving(1.0, prompt, OUTPUT), 0, 0, running, 4096)
    return ServingSteps(costs, served)


def load(rate_per_s: float) -> Load:
    found = steps().load(rate_per_s)
    assert found is not None
    return found


@pytest.mark.parametrize("rate_per_s", [5.0, 20.0, 50.0])
def test_a_steady_state_is_that_of_the_closed_form(rate_per_s: float) -> None:
    """Steps of a + t n seconds: n = (O - 1) a / (1/λ - (O - 1) t - P t)."""
    a, t = COSTS.constant_s, COSTS.token_s
    found = steps(LinearCosts(4, a, t, 0.0)).load(rate_per_s)
    assert found is not None
    wanted = (OUTPUT - 1) * a / (1 / rate_per_s - (OUTPUT - 1) * t - PROMPT * t)
    assert wanted > 1
    assert found.running == pytest.approx(wanted, rel=0.01)
    assert found.tpot_s == pytest.approx(wanted / rate_per_s / (OUTPUT - 1), rel=0.01)
    assert found.ttft_s >= a + t * PROMPT
    assert found.in_flight == pytest.approx(wanted + rate_per_s * found.ttft_s, rel=0.01)


def test_the_highest_rate_is_where_most_requests_run() -> None:
    a, t = COSTS.constant_s, COSTS.token_s
    found = steps(LinearCosts(4, a, t, 0.0), running=64)
    most = 1 / ((OUTPUT - 1) * (a / 64 + t) + PROMPT * t)
    assert found.most_rate(lambda load: True) == pytest.approx(most, rel=0.01)
    assert found.load(1.02 * most) is None
    # A promise of the time of a step with 32 requests, whose prompts take some time, too.
    slow = a / (1 - t * (PROMPT + OUTPUT - 1) * 20)
    kept = found.most_rate(lambda load: load.tpot_s <= slow)
    assert kept == pytest.approx(20, rel=0.02)


def test_pages_are_those_of_whole_lengths() -> None:
    serving = Serving(1.0, PROMPT, OUTPUT)
    assert Load(1.0, 2.0, 2.5, 1.0, 0.5).tokens(serving) == 3 * 304  # 19 pages of 16


def test_a_line_is_read_backwards() -> None:
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, 3.0)]
    assert [interpolated(points, y) for y in (-1, 0.5, 2, 3, 9)] == [0, 5, 15, 20, 20]


def simulated(rate_per_s: float, limits: Limits, trains: bool = False) -> ServingReport:
    """The engine's report of half a minute of requests."""
    latency = Latency(COSTS.constant_s, COSTS.token_s, COSTS.key_s, 1e-9, 1e-9, 1e-9)
    unit = Latency(*(2 * part / COSTS.layers for part in (0.002, 5e-5, 1e-8)))
    engine = SimulatedEngine(COSTS, 100_000, 1, limits, latencies=Latencies(latency, unit))
    if trains:
        engine.finetune("tuned", repeat((2048,)))
    workload = synthetic(Poisson(rate_per_s), Fixed(PROMPT), Fixed(OUTPUT), seed=0, duration_s=30.0)
    events = Simulation([engine], RoundRobin()).run(workload, 30.0)
    slo = Slo(limits.ttft_slo_s, limits.tpot_slo_s)
    return serving_report(events, slo, start_s=0.0, end_s=30.0)


@pytest.mark.parametrize("rate_per_s", [10.0, 30.0])
def test_the_engine_takes_as_long(rate_per_s: float) -> None:
    found, report = load(rate_per_s), simulated(rate_per_s, Limits())
    assert report.tpot is not None
    assert report.ttft is not None
    assert found.tpot_s == pytest.approx(report.tpot.mean_s, rel=0.1)
    assert found.ttft_s == pytest.approx(report.ttft.mean_s, rel=0.3)


def test_the_engine_trains_as_much_beside() -> None:
    rate_per_s, slo_s = 10.0, 0.05
    training = Training(1, 2048)
    found = CoServing(steps(), COSTS, training).find(load(rate_per_s), slo_s, lambda load: True)
    report = simulated(rate_per_s, Limits(tpot_slo_s=slo_s), trains=True)
    assert found is not None
    assert found.load.tpot_s == pytest.approx(slo_s)
    assert found.tokens_per_s == pytest.approx(report.finetuning_throughput, rel=0.2)

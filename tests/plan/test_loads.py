"""Steady states against closed forms and the simulated engine; the front against brute force."""

from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.plan.candidate import Candidate, Machine, cheapest, pareto_front
from pcg.plan.loads import CoServing, Load, Served, ServingSteps, interpolated
from pcg.plan.rank_plan import TrainingChoice
from pcg.plan.workload import Serving, Training
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.report import Slo, serving_report
from pcg.simulate.distributions import Fixed, Poisson
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import synthetic
from tests.support.linear_costs import LinearCosts

COSTS = LinearCosts(layers=4, constant_s=0.002, token_s=5e-5, key_s=1e-8)
PROMPT, OUTPUT = 100, 200


def steps(costs=COSTS, prompt=PROMPT, running=256):
    served = Served(Serving(1.0, prompt, OUTPUT), 0, 0, running, 4096)
    return ServingSteps(costs, served)


def load(rate_per_s):
    found = steps().load(rate_per_s)
    assert found is not None
    return found


@pytest.mark.parametrize("rate_per_s", [5.0, 20.0, 50.0])
def test_a_steady_state_is_that_of_the_closed_form(rate_per_s):
    """Steps of a + t n seconds: n = (O - 1) a / (1/λ - (O - 1) t - P t)."""
    a, t = COSTS.constant_s, COSTS.token_s
    found = steps(LinearCosts(4, a, t, 0.0)).load(rate_per_s)
    wanted = (OUTPUT - 1) * a / (1 / rate_per_s - (OUTPUT - 1) * t - PROMPT * t)
    assert wanted > 1
    assert found.running == pytest.approx(wanted, rel=0.01)
    assert found.tpot_s == pytest.approx(wanted / rate_per_s / (OUTPUT - 1), rel=0.01)
    assert found.ttft_s >= a + t * PROMPT
    assert found.in_flight == pytest.approx(wanted + rate_per_s * found.ttft_s, rel=0.01)


def test_the_highest_rate_is_where_most_requests_run():
    a, t = COSTS.constant_s, COSTS.token_s
    found = steps(LinearCosts(4, a, t, 0.0), running=64)
    most = 1 / ((OUTPUT - 1) * (a / 64 + t) + PROMPT * t)
    assert found.most_rate(lambda load: True) == pytest.approx(most, rel=0.01)
    assert found.load(1.02 * most) is None
    # A promise of the time of a step with 32 requests, whose prompts take some time, too.
    slow = a / (1 - t * (PROMPT + OUTPUT - 1) * 20)
    kept = found.most_rate(lambda load: load.tpot_s <= slow)
    assert kept == pytest.approx(20, rel=0.02)


def test_pages_are_those_of_whole_lengths():
    serving = Serving(1.0, PROMPT, OUTPUT)
    assert Load(1.0, 2.0, 2.5, 1.0, 0.5).tokens(serving) == 3 * 304  # 19 pages of 16


def test_a_line_is_read_backwards():
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, 3.0)]
    assert [interpolated(points, y) for y in (-1, 0.5, 2, 3, 9)] == [0, 5, 15, 20, 20]


def simulated(rate_per_s, limits, trains=False):
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


@pytest.mark.parametrize("rate_per_s", [pytest.param(10.0, marks=pytest.mark.slow), 30.0])
def test_the_engine_takes_as_long(rate_per_s):
    found, report = load(rate_per_s), simulated(rate_per_s, Limits())
    assert found.tpot_s == pytest.approx(report.tpot.mean_s, rel=0.1)
    assert found.ttft_s == pytest.approx(report.ttft.mean_s, rel=0.3)


def test_the_engine_trains_as_much_beside():
    rate_per_s, slo_s = 10.0, 0.05
    training = Training(1, 2048)
    found = CoServing(steps(), COSTS, training).find(load(rate_per_s), slo_s, lambda load: True)
    report = simulated(rate_per_s, Limits(tpot_slo_s=slo_s), trains=True)
    assert found.load.tpot_s == pytest.approx(slo_s)
    assert found.tokens_per_s == pytest.approx(report.finetuning_throughput, rel=0.2)


PRICES = {"A": 1.0, "B": 2.5}
NUMBERS = st.integers(1, 4)


def candidate(gpu, gpus, tokens_per_s, step_s):
    price = PRICES.get(gpu)
    return Candidate(
        Machine(gpu, 1, gpus, "bfloat16"),
        TrainingChoice(1, 1, 1.0),
        {},
        1,
        step_s=float(step_s),
        finetuning_tokens_per_s=float(tokens_per_s),
        dollars_per_hour=None if price is None else price * gpus,
    )


candidates = st.lists(
    st.builds(candidate, st.sampled_from("ABCD"), NUMBERS, NUMBERS, NUMBERS), max_size=12
)


def numbers(one):
    """Cost, tokens less than none, seconds: the less the better; and what costs are compared in."""
    tokens, seconds = one.finetuning_tokens_per_s, one.step_s
    assert tokens is not None
    assert seconds is not None
    if one.dollars_per_hour is None:
        return one.machine.gpus, -tokens, seconds, one.machine.gpu
    return one.dollars_per_hour, -tokens, seconds, "dollars"


def is_beaten(one, by):
    a, b = numbers(one), numbers(by)
    return (
        a[3] == b[3] and a[:3] != b[:3] and all(y <= x for x, y in zip(a[:3], b[:3], strict=True))
    )


@given(candidates)
def test_the_front_is_what_none_beats(found):
    front = pareto_front(found)
    wanted = [one for one in found if not any(is_beaten(one, other) for other in found)]
    assert {numbers(one) for one in front} == {numbers(one) for one in wanted}
    assert len({numbers(one) for one in front}) == len(front)  # of equals one


@given(candidates)
def test_order_does_not_matter(found):
    other = found[::-1]
    assert [numbers(one) for one in pareto_front(found)] == [
        numbers(one) for one in pareto_front(other)
    ]
    first = cheapest(found)
    assert first is None or numbers(first) == numbers(cheapest(other) or first)


@given(candidates)
def test_the_cheapest_is_on_the_front(found):
    chosen = cheapest(found)
    assert (chosen is None) == (not found)
    if chosen is not None:
        assert numbers(chosen) in {numbers(one) for one in pareto_front(found)}
        if chosen.dollars_per_hour is not None:
            dollars = [one.dollars_per_hour for one in found if one.dollars_per_hour is not None]
            assert chosen.dollars_per_hour == min(dollars)

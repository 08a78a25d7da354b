"""Costs fitted to a profile: of a device whose costs are known they are these."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pcg.errors import CostModelError
from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from profiled_costs import ProfiledCosts, StepProfile


class CostsOfSequences(LinearCosts):
    """With what a sequence and a window take for themselves."""

    def step_seconds(self, shape: StepShape) -> float:
        of_window = 0.004 * (shape.trained > 0) + 3e-4 * shape.trained
        return super().step_seconds(shape) + 0.002 * shape.sampled + of_window


def profile_of(costs: LinearCosts) -> StepProfile:
    """Of an engine that serves prompts of many lengths beside a job."""
    latencies = Latencies(Latency(0.01, 1e-4, 1e-8), Latency(0.01, 1e-4, 1e-8))
    limits = Limits(tokens=64, least_chunk=4, finetuning_floor=0.5)
    engine = SimulatedEngine(costs, 400, 1000, limits, latencies=latencies)
    profile = StepProfile()
    job = engine.finetune("trained", [(40 + 7 * i,) for i in range(8)])
    device = profile.watch(engine, job)
    for i in range(24):
        engine.submit(Request((1,) * (9 + 7 * i), SamplingParams(max_new_tokens=20 + i)))
    left = 24
    while left:
        left -= device.step(engine)
    return profile


def test_a_profile_gives_the_costs_back() -> None:
    costs = CostsOfSequences(layers=4)
    profile = profile_of(costs)
    found = ProfiledCosts(profile, costs.layers)
    shapes = [
        StepShape.of([]),
        StepShape(tokens=1, pairs=900, sampled=1),
        StepShape(tokens=300, pairs=45_150, sampled=1, trained=200),
        StepShape(tokens=32, pairs=4000, sampled=32),
    ]
    for shape in shapes:
        assert found.step_seconds(shape) == pytest.approx(costs.step_seconds(shape), rel=1e-6)
    window = StepShape(tokens=50, pairs=4000, trained=50)
    assert found.backward_seconds(1, window) == pytest.approx(costs.backward_seconds(1, window))
    assert found.loss_seconds(50) == pytest.approx(costs.loss_seconds(50))
    assert found.update_seconds() == pytest.approx(costs.update_seconds())


def test_what_is_not_seen_costs_nothing_and_nothing_is_below_it() -> None:
    """A device that has a discount a key: no cost is taken for negative."""

    class Discounted(LinearCosts):
        def step_seconds(self, shape: StepShape) -> float:
            return 0.01 + 1e-3 * shape.tokens - 1e-7 * shape.pairs

    found = ProfiledCosts(profile_of(Discounted()), 2)
    few, many = (found.step_seconds(StepShape(tokens=1, pairs=pairs)) for pairs in (1, 10**6))
    assert 0 < few <= many


def test_too_short_a_profile_is_refused() -> None:
    with pytest.raises(CostModelError, match="a profile of 0 steps, 0 layers backward and 0"):
        ProfiledCosts(StepProfile(), 2)

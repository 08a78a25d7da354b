"""Whole workloads: rates, adapters, lengths, and what a seed decides."""

import math
from collections import Counter
from itertools import pairwise

import pytest

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import (
    Between,
    Constant,
    Distinct,
    Fixed,
    Gamma,
    Lengths,
    LogNormal,
    Poisson,
    PowerLaw,
    Uniform,
)
from pcg.simulate.flexllm import bursty_workload
from pcg.simulate.punica import hour_workload
from pcg.simulate.synthetic import assign_adapters, assign_tenants, s_lora, synthetic
from pcg.simulate.workload import Workload

SHORT = Fixed(3)


def test_either_a_duration_or_a_number_of_requests() -> None:
    timed = synthetic(Constant(2.0), SHORT, Fixed(5), seed=0, duration_s=10.0)
    assert [one.time_s for one in timed] == [i / 2 for i in range(20)]
    assert {(one.prompt_tokens, one.output_tokens, one.adapter) for one in timed} == {(3, 5, None)}
    assert len(synthetic(Poisson(2.0), SHORT, SHORT, seed=0, requests=33)) == 33
    for given in ({}, {"duration_s": 1.0, "requests": 1}):
        with pytest.raises(BenchmarkError, match="give one of the two"):
            synthetic(Poisson(2.0), SHORT, SHORT, seed=0, **given)
    with pytest.raises(BenchmarkError, match="no requests; use a longer duration"):
        synthetic(Poisson(0.001), SHORT, SHORT, seed=0, duration_s=0.001)


def test_a_seed_decides_all_and_each_part_by_itself() -> None:
    ranged = Between(1, 99)

    def make(seed: int, prompts: Lengths = ranged) -> Workload:
        return synthetic(Poisson(5.0), prompts, ranged, seed=seed, requests=300)

    assert make(1) == make(1)
    assert make(1) != make(2)
    other = make(1, Fixed(7))
    assert [one.time_s for one in other] == [one.time_s for one in make(1)]
    assert [one.output_tokens for one in other] == [one.output_tokens for one in make(1)]
    # Prompts and outputs of one range and seed are not the same numbers.
    assert any(one.prompt_tokens != one.output_tokens for one in make(1))


def test_spread_changes_adapters_alone() -> None:
    plain = synthetic(Poisson(5.0), Between(1, 99), Between(1, 99), seed=4, requests=100)
    named = assign_adapters(plain, Uniform(), seed=4)
    assert Counter(one.adapter for one in named) == {f"adapter-{i}": 10 for i in range(10)}
    for one, other in zip(plain, named, strict=True):
        assert (one.time_s, one.prompt_tokens) == (other.time_s, other.prompt_tokens)
    mine = assign_adapters(plain, Uniform(2), seed=4, adapters=["a", "b", "c"])
    assert set(mine.adapters) == {"a", "b"}
    with pytest.raises(BenchmarkError, match="100 adapters are asked for and 2 named"):
        assign_adapters(plain, Distinct(), seed=4, adapters=["a", "b"])


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_s_lora_s_rates_are_a_power_law(cv: float) -> None:
    law = PowerLaw(20, 1.0)
    rate, duration = 10.0, 6000.0
    found = s_lora(law, rate, cv, SHORT, SHORT, seed=11, duration_s=duration)
    counts = Counter(one.adapter for one in found)
    # In the long run, counts of a renewal process vary by cv² times their mean.
    for place, share in enumerate(law.shares(1)):
        expected = rate * duration * share
        assert abs(counts[f"adapter-{place}"] - expected) <= 4 * cv * math.sqrt(expected)
    assert abs(len(found) - rate * duration) <= 4 * cv * math.sqrt(rate * duration)


def test_s_lora_s_adapters_have_gamma_intervals_of_their_own() -> None:
    found = s_lora(PowerLaw(5, 1.0), 20.0, 3.0, SHORT, SHORT, seed=2, duration_s=20_000.0)
    for name in ("adapter-0", "adapter-4"):
        times = [one.time_s for one in found if one.adapter == name]
        gaps = [after - before for before, after in pairwise(times)]
        mean = math.fsum(gaps) / len(gaps)
        cv = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
        # By the delta method the relative error of a cv is about √((2 + 6 cv²) / 4n).
        assert abs(cv - 3.0) <= 4 * 3.0 * math.sqrt((2 + 6 * 9.0) / 4 / len(gaps))


def test_s_lora_is_the_gamma_process_where_there_is_one_adapter() -> None:
    found = s_lora(PowerLaw(1), 5.0, 2.0, SHORT, SHORT, seed=3, adapters=["only"])
    assert {one.adapter for one in found} == {"only"}
    assert len(found) == pytest.approx(1500, abs=4 * 2.0 * math.sqrt(1500))
    with pytest.raises(BenchmarkError, match=r"rate_per_s=-1\.0"):
        s_lora(PowerLaw(1), -1.0, 2.0, SHORT, SHORT, seed=3)
    with pytest.raises(BenchmarkError, match="cv=0"):
        s_lora(PowerLaw(1), 1.0, 0, SHORT, SHORT, seed=3)


def test_a_seed_gives_what_it_gave() -> None:
    """A trace is known by its name and seed, so generators must not change unawares."""
    lengths = Between(8, 512)
    found = s_lora(PowerLaw(200, 1.0), 2.0, 1.0, lengths, lengths, seed=0).requests[:3]
    assert [(one.adapter, one.prompt_tokens, one.output_tokens) for one in found] == [
        ("adapter-1", 133, 475),
        ("adapter-0", 340, 76),
        ("adapter-0", 391, 509),
    ]
    assert [one.time_s for one in found] == pytest.approx(
        [0.7518130844, 0.8908482732, 0.9656521883]
    )


def test_punica_s_hour_rises_and_falls() -> None:
    found = hour_workload(0.5, seed=1)
    thirds = Counter(int(one.time_s // 1200) for one in found)
    for third, share in enumerate((2 / 9, 5 / 9, 2 / 9)):
        expected = 1800 * share
        assert abs(thirds[third] - expected) <= 4 * math.sqrt(expected)
    counts = sorted(Counter(one.adapter for one in found).values(), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(1.5, rel=0.01)
    assert counts[1] / counts[2] == pytest.approx(1.5, rel=0.01)


def test_flexllm_is_burstier_than_poisson() -> None:
    short = LogNormal(20, 40, most=64)
    found = bursty_workload(4.0, 1.0, seed=1, prompts=short, outputs=short)
    periods = Counter(int(one.time_s // 10) for one in found)
    counts = [periods[i] for i in range(120)]
    mean = sum(counts) / 120
    assert abs(mean - 40) <= 4 * math.sqrt((40 + 40**2) / 120)
    assert sum((one - mean) ** 2 for one in counts) / 120 > 10 * mean  # Poisson: 1, here 41


def test_tenants_own_adapters() -> None:
    plain = synthetic(Gamma(5.0, 1.0), SHORT, SHORT, seed=4, requests=40)
    assert {one.tenant for one in assign_tenants(plain, ["x", "y"])} == {"x"}
    found = assign_tenants(assign_adapters(plain, Uniform(4), seed=0), ["x", "y"])
    owners = {one.adapter: one.tenant for one in found}
    assert [owners[name] for name in found.adapters] == ["x", "y", "x", "y"]
    assert all(one.tenant == owners[one.adapter] for one in found)
    with pytest.raises(BenchmarkError, match="no tenants"):
        assign_tenants(plain, [])

"""Arrival processes against their closed forms; a statistic may be four standard errors off."""

import math
from itertools import islice, pairwise, takewhile
from random import Random
from statistics import fmean, pvariance, variance

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import Arrivals, Bursty, Constant, Gamma, Poisson, RateCurve

ALL = (
    Constant(4.0),
    Poisson(4.0),
    Gamma(4.0, 0.5),
    Gamma(4.0, 3.0),
    Bursty(4.0, 0.8, 5.0),
    RateCurve(4.0, 30.0, (1.0, 3.0, 0.0, 2.0)),
)


def counts(arrivals: Arrivals, width_s: float, many: int, seed: int) -> list[int]:
    """Requests in each of so many neighbouring windows of a width."""
    found = [0] * many
    for time in takewhile(lambda time: time < width_s * many, arrivals.times_s(Random(seed))):
        found[int(time / width_s)] += 1
    return found


def first_counts(arrivals: Arrivals, width_s: float, many: int) -> list[int]:
    """Requests in the first window of so many runs."""
    return [counts(arrivals, width_s, 1, seed)[0] for seed in range(many)]


def close(found: list[float] | list[int], mean: float) -> bool:
    error = math.sqrt(variance(found) / len(found))
    return abs(fmean(found) - mean) <= 4 * error + 1e-12


@pytest.mark.parametrize("arrivals", ALL, ids=str)
def test_mean_rate(arrivals: Arrivals) -> None:
    assert close(counts(arrivals, 30.0, 2000, seed=1), 120.0)


@pytest.mark.parametrize("arrivals", ALL, ids=str)
@given(seed=st.integers(0, 2**32))
def test_times_rise_from_zero_and_follow_from_the_seed(arrivals: Arrivals, seed: int) -> None:
    times = list(islice(arrivals.times_s(Random(seed)), 200))
    assert times[0] >= 0
    assert all(before <= after for before, after in pairwise(times))
    assert times == list(islice(arrivals.times_s(Random(seed)), 200))


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0, 4.0])
def test_gamma_intervals(cv: float) -> None:
    many = 200_000
    times = list(islice(Gamma(5.0, cv).times_s(Random(7)), many))
    gaps = [after - before for before, after in pairwise(times)]
    assert close(gaps, 1 / 5.0)
    # The variance of a sample variance is (μ₄ − σ⁴) / n, with μ₄ / σ⁴ = 3 + 6 cv² for a Gamma.
    spread = (cv / 5.0) ** 2
    assert abs(pvariance(gaps) - spread) <= 4 * spread * math.sqrt((2 + 6 * cv**2) / many)


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0, 8.0])
def test_gamma_starts_in_its_steady_state(cv: float) -> None:
    found = first_counts(Gamma(0.2, cv), 30.0, 4000)
    assert close(found, 6.0)


def apart(found: list[float], others: list[float]) -> bool:
    """Whether two samples are of two distributions: Kolmogorov and Smirnov's test, p < 0.001."""
    # To the nanosecond: a gap between two times has no more places than they have.
    found, others = np.round(found, 9).tolist(), np.round(others, 9).tolist()
    both = np.concatenate([found, others])
    shares = [
        np.searchsorted(np.sort(one), both, side="right") / len(one) for one in (found, others)
    ]
    bound = 1.95 * math.sqrt(1 / len(found) + 1 / len(others))
    return bool(np.abs(shares[0] - shares[1]).max() > bound)


@pytest.mark.parametrize("cv", [0.4, 2.0, 4.0])
def test_gamma_is_numpy_s(cv: float) -> None:
    """Intervals, and what is left of one at a moment of a process that numpy ran for long."""
    generator = np.random.default_rng(0)
    shape, scale = 1 / cv**2, cv**2 / 5.0
    times = list(islice(Gamma(5.0, cv).times_s(Random(3)), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert not apart(gaps, generator.gamma(shape, scale, 20_000).tolist())
    assert apart(gaps, generator.gamma(1.3 * shape, scale, 20_000).tolist())

    ran = np.cumsum(generator.gamma(shape, scale, 400_000))
    moments = generator.uniform(0.1 * ran[-1], 0.9 * ran[-1], 5000)
    left = ran[np.searchsorted(ran, moments)] - moments
    first = [next(Gamma(5.0, cv).times_s(Random(seed))) for seed in range(5000)]
    assert not apart(first, left.tolist())


def test_a_gamma_of_cv_one_is_poisson() -> None:
    gamma, poisson = (first_counts(one, 2.0, 20_000) for one in (Gamma(1.0, 1.0), Poisson(1.0)))
    for many in range(7):
        expected = math.exp(-2.0) * 2.0**many / math.factorial(many)
        error = math.sqrt(expected * (1 - expected) / 20_000)
        for found in (gamma, poisson):
            assert abs(found.count(many) / 20_000 - expected) <= 4 * error


def test_bursty_counts_are_negative_binomial() -> None:
    found = counts(Bursty(6.0, 0.7, 5.0), 5.0, 40_000, seed=3)
    mean, shape = 30.0, 1 / 0.7**2
    assert close(found, mean)
    assert close([(one - mean) ** 2 for one in found], mean + (0.7 * mean) ** 2)
    none = (shape / (shape + mean)) ** shape  # the probability of an empty period
    share = found.count(0) / len(found)
    assert abs(share - none) <= 4 * math.sqrt(none * (1 - none) / len(found))


def test_bursty_periods_are_independent() -> None:
    found = [one - 30.0 for one in counts(Bursty(6.0, 0.7, 5.0), 5.0, 40_000, seed=4)]
    assert close([before * after for before, after in pairwise(found)], 0.0)


def test_curve_follows_its_heights() -> None:
    curve = RateCurve(2.0, 60.0, (0.0, 1.0, 0.0))
    assert curve.rate_at(30.0) == pytest.approx(4.0)
    assert curve.rate_at(15.0) == pytest.approx(2.0)
    assert curve.rate_at(75.0) == pytest.approx(2.0)  # in the second period
    sixths = [[0] * 1000 for _ in range(6)]
    for time in takewhile(lambda time: time < 60_000.0, curve.times_s(Random(2))):
        sixths[int(time % 60.0 / 10.0)][int(time / 60.0)] += 1
    # Areas of a triangle of base 60 s and height 4: thirds of its half are as 1, 3 and 5.
    for found, share in zip(sixths, (1, 3, 5, 5, 3, 1), strict=True):
        assert close(found, 120.0 * share / 18)


def test_constant() -> None:
    assert list(islice(Constant(8.0).times_s(Random(0)), 3)) == [0.0, 0.125, 0.25]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), r"rate_per_s=0\.0; use a finite number above 0"),
        (lambda: Gamma(1.0, -1.0), r"cv=-1\.0"),
        (lambda: Gamma(math.inf, 1.0), "rate_per_s=inf"),
        (lambda: Bursty(1.0, 1.0, 0.0), r"period_s=0\.0"),
        (lambda: RateCurve(1.0, 1.0, (1.0,)), r"heights=\(1\.0,\); use at least two"),
        (lambda: RateCurve(1.0, 1.0, (0.0, 0.0)), "one above"),
        (lambda: RateCurve(1.0, 1.0, (1.0, -1.0)), "at least 0"),
        (lambda: Poisson(math.nan), "rate_per_s=nan"),
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        make()

"""Workloads: arrivals, popularity, lengths and whole workloads against their closed forms."""

import math
from collections import Counter
from itertools import islice, pairwise, takewhile
from random import Random
from statistics import fmean, pstdev, variance

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import (
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Between,
    Bursty,
    Constant,
    Distinct,
    Fixed,
    Gamma,
    Identical,
    LogNormal,
    Poisson,
    PowerLaw,
    RateCurve,
    Skewed,
    Uniform,
)
from pcg.simulate.punica import hour_workload
from pcg.simulate.synthetic import assign_adapters, assign_tenants, s_lora, synthetic

ALL = (
    Constant(4.0),
    Poisson(4.0),
    Gamma(4.0, 0.5),
    Gamma(4.0, 3.0),
    Bursty(4.0, 0.8, 5.0),
    RateCurve(4.0, 30.0, (1.0, 3.0, 0.0, 2.0)),
)


def counts(arrivals, width_s, many, seed):
    """Requests in each of so many neighbouring windows of a width."""
    found = [0] * many
    for time in takewhile(lambda time: time < width_s * many, arrivals.times_s(Random(seed))):
        found[int(time / width_s)] += 1
    return found


def close(found, mean):
    error = math.sqrt(variance(found) / len(found))
    return abs(fmean(found) - mean) <= 4 * error + 1e-12


@pytest.mark.parametrize("arrivals", ALL, ids=str)
def test_mean_rate(arrivals):
    assert close(counts(arrivals, 30.0, 2000, seed=1), 120.0)


@pytest.mark.parametrize("arrivals", ALL, ids=str)
@given(seed=st.integers(0, 2**32))
def test_times_rise_from_zero_and_follow_from_the_seed(arrivals, seed):
    times = list(islice(arrivals.times_s(Random(seed)), 200))
    assert times[0] >= 0
    assert all(before <= after for before, after in pairwise(times))
    assert times == list(islice(arrivals.times_s(Random(seed)), 200))


def apart(found, others):
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
def test_gamma_is_numpy_s(cv):
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


def test_bursty_counts_are_negative_binomial():
    found = counts(Bursty(6.0, 0.7, 5.0), 5.0, 40_000, seed=3)
    mean, shape = 30.0, 1 / 0.7**2
    assert close(found, mean)
    assert close([(one - mean) ** 2 for one in found], mean + (0.7 * mean) ** 2)
    none = (shape / (shape + mean)) ** shape  # the probability of an empty period
    share = found.count(0) / len(found)
    assert abs(share - none) <= 4 * math.sqrt(none * (1 - none) / len(found))


def test_bursty_periods_are_independent():
    found = [one - 30.0 for one in counts(Bursty(6.0, 0.7, 5.0), 5.0, 40_000, seed=4)]
    assert close([before * after for before, after in pairwise(found)], 0.0)


def test_curve_follows_its_heights():
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
def test_refused(make, message):
    with pytest.raises(BenchmarkError, match=message):
        make()


POPULARITIES = (
    Distinct(),
    Uniform(),
    Uniform(7),
    Skewed(),
    Skewed(3.0),
    Identical(),
    PowerLaw(50, 1.2),
)


@pytest.mark.parametrize("popularity", POPULARITIES, ids=str)
@given(requests=st.integers(1, 3000))
def test_counts_are_the_shares_to_within_a_request(popularity, requests):
    shares, counts = popularity.shares(requests), popularity.counts(requests)
    assert math.fsum(shares) == pytest.approx(1.0)
    assert list(shares) == sorted(shares, reverse=True)
    assert sum(counts) == requests
    assert len(counts) == len(shares)
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - share * requests) < 1 + 1e-9
    assert list(counts) == sorted(counts, reverse=True)


def test_punica_s_four_of_64_requests():
    assert Distinct().counts(64) == (1,) * 64
    assert Uniform().counts(64) == (8,) * 8
    assert Identical().counts(64) == (64,)
    # (1.5⁸ − 1) / 0.5 = 49.3 requests are at least one each; a ninth adapter would take 74.9.
    assert len(Skewed().counts(64)) == 8
    assert len(Skewed().counts(75)) == 9


@given(requests=st.integers(1, 10**6), ratio=st.floats(1.1, 4.0))
def test_skewed_leaves_the_last_a_request_and_no_room_for_one_more(requests, ratio):
    shares = Skewed(ratio).shares(requests)
    many = len(shares)
    for one, following in pairwise(shares):
        assert one / following == pytest.approx(ratio)
    assert shares[-1] * requests >= 1 - 1e-6
    assert sum(ratio**i for i in range(many + 1)) > requests * (1 - 1e-6)


def test_power_law():
    shares = PowerLaw(200, 1.0).shares(1)
    harmonic = math.fsum(1 / i for i in range(1, 201))
    assert shares[0] == pytest.approx(1 / harmonic)
    assert shares[9] == pytest.approx(shares[0] / 10)
    assert PowerLaw(4, 0.0).shares(1) == (0.25,) * 4
    assert PowerLaw(3, 2.0).shares(1) == pytest.approx((36 / 49, 9 / 49, 4 / 49))


def test_order_is_the_counts_shuffled_by_the_seed():
    popularity = PowerLaw(10, 1.0)
    order = popularity.order(500, Random(1))
    assert tuple(order.count(i) for i in range(10)) == popularity.counts(500)
    assert order == popularity.order(500, Random(1))
    assert order != popularity.order(500, Random(2))
    # No stretch of the order is the most popular adapter's alone: shuffled, not sorted.
    assert 0.2 < order[:250].count(0) / order.count(0) < 0.8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Skewed(1.0), r"ratio=1\.0; use a finite number above 1"),
        (lambda: PowerLaw(0), "adapters=0; use a whole number of at least 1"),
        (lambda: PowerLaw(3, -1.0), r"exponent=-1\.0"),
        (lambda: Uniform(0), "adapters=0"),
        (lambda: Identical().counts(0), "requests=0"),
    ],
)
def test_refused_popularity(make, message):
    with pytest.raises(BenchmarkError, match=message):
        make()


MANY = 20_000


def drawn(lengths, seed=5):
    random = Random(seed)
    return sorted(lengths.draw(random) for _ in range(MANY))


def share_up_to(found, length):
    return sum(one <= length for one in found) / len(found)


def test_between_is_uniform_and_has_both_ends():
    found = drawn(Between(8, 512))
    assert found[0] == 8
    assert found[-1] == 512
    spread = (512 - 8 + 1) / math.sqrt(12)  # nearly that of a continuous range
    assert abs(fmean(found) - 260) <= 4 * spread / math.sqrt(MANY)
    for least in (100, 250, 400):
        share = (least - 7) / 505
        assert abs(share_up_to(found, least) - share) <= 4 * math.sqrt(share * (1 - share) / MANY)


@pytest.mark.parametrize(
    ("lengths", "median", "p90"), [(SHAREGPT_PROMPTS, 1730, 5696), (SHAREGPT_OUTPUTS, 415, 834)]
)
def test_sharegpt_has_its_source_s_quantiles(lengths, median, p90):
    found = drawn(lengths)
    assert abs(share_up_to(found, median) - 0.5) <= 4 * math.sqrt(0.25 / MANY)
    assert abs(share_up_to(found, p90) - 0.9) <= 4 * math.sqrt(0.09 / MANY)


def test_logarithms_are_normal():
    lengths = LogNormal(5000, 12_000)
    logs = [math.log(one) for one in drawn(lengths)]
    sigma = math.log(12_000 / 5000) / 1.2815515655446004
    assert lengths.sigma == pytest.approx(sigma)
    assert abs(fmean(logs) - math.log(5000)) <= 4 * sigma / math.sqrt(MANY)
    assert abs(pstdev(logs) - sigma) <= 4 * sigma / math.sqrt(2 * MANY)


def test_a_cut_keeps_the_shape_below_it():
    whole, cut = LogNormal(400, 900), LogNormal(400, 900, most=600)
    found, below = drawn(cut), [one for one in drawn(whole, seed=6) if one <= 600]
    assert found[-1] <= 600
    assert found[-1] > 590
    for length in (200, 350, 500):
        one, other = share_up_to(found, length), share_up_to(below, length)
        error = math.sqrt(one * (1 - one) * (1 / MANY + 1 / len(below)))
        assert abs(one - other) <= 4 * error


@given(
    median=st.floats(1.0, 1e5), times=st.floats(1.01, 50.0), most=st.none() | st.integers(1, 10**5)
)
def test_lengths_are_whole_and_in_range(median, times, most):
    try:
        lengths = LogNormal(median, median * times, most)
    except BenchmarkError:
        assume(False)
    random = Random(0)
    for _ in range(50):
        length = lengths.draw(random)
        assert isinstance(length, int)
        assert 1 <= length <= (most or math.inf)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "tokens=0; use a whole number of at least 1"),
        (lambda: Between(9, 8), "most=8; use a whole number of at least 9"),
        (lambda: LogNormal(10, 10), "median=10 and p90=10"),
        (lambda: LogNormal(0.5, 10), r"median=0\.5"),
        (
            lambda: LogNormal(1730, 5696, most=4),
            "most=4, .* less than one in a million is as short",
        ),
    ],
)
def test_refused_lengths(make, message):
    with pytest.raises(BenchmarkError, match=message):
        make()


SHORT = Fixed(3)


def test_either_a_duration_or_a_number_of_requests():
    timed = synthetic(Constant(2.0), SHORT, Fixed(5), seed=0, duration_s=10.0)
    assert [one.time_s for one in timed] == [i / 2 for i in range(20)]
    assert {(one.prompt_tokens, one.output_tokens, one.adapter) for one in timed} == {(3, 5, None)}
    assert len(synthetic(Poisson(2.0), SHORT, SHORT, seed=0, requests=33)) == 33
    for both in ({}, {"duration_s": 1.0, "requests": 1}):
        with pytest.raises(BenchmarkError, match="give one of the two"):
            synthetic(Poisson(2.0), SHORT, SHORT, seed=0, **both)
    with pytest.raises(BenchmarkError, match="no requests; use a longer duration"):
        synthetic(Poisson(0.001), SHORT, SHORT, seed=0, duration_s=0.001)


def test_a_seed_decides_all_and_each_part_by_itself():
    ranged = Between(1, 99)

    def make(seed, prompts=ranged):
        return synthetic(Poisson(5.0), prompts, ranged, seed=seed, requests=300)

    assert make(1) == make(1)
    assert make(1) != make(2)
    other = make(1, Fixed(7))
    assert [one.time_s for one in other] == [one.time_s for one in make(1)]
    assert [one.output_tokens for one in other] == [one.output_tokens for one in make(1)]
    # Prompts and outputs of one range and seed are not the same numbers.
    assert any(one.prompt_tokens != one.output_tokens for one in make(1))


def test_spread_changes_adapters_alone():
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
def test_s_lora_s_rates_are_a_power_law(cv):
    law = PowerLaw(20, 1.0)
    rate, duration = 10.0, 6000.0
    found = s_lora(law, rate, cv, SHORT, SHORT, seed=11, duration_s=duration)
    counts = Counter(one.adapter for one in found)
    # In the long run, counts of a renewal process vary by cv² times their mean.
    for place, share in enumerate(law.shares(1)):
        expected = rate * duration * share
        assert abs(counts[f"adapter-{place}"] - expected) <= 4 * cv * math.sqrt(expected)
    assert abs(len(found) - rate * duration) <= 4 * cv * math.sqrt(rate * duration)


def test_s_lora_s_adapters_have_gamma_intervals_of_their_own():
    found = s_lora(PowerLaw(5, 1.0), 20.0, 3.0, SHORT, SHORT, seed=2, duration_s=20_000.0)
    for name in ("adapter-0", "adapter-4"):
        times = [one.time_s for one in found if one.adapter == name]
        gaps = [after - before for before, after in pairwise(times)]
        mean = math.fsum(gaps) / len(gaps)
        cv = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
        # By the delta method the relative error of a cv is about √((2 + 6 cv²) / 4n).
        assert abs(cv - 3.0) <= 4 * 3.0 * math.sqrt((2 + 6 * 9.0) / 4 / len(gaps))


def test_a_seed_gives_what_it_gave():
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


def test_punica_s_hour_rises_and_falls():
    found = hour_workload(0.5, seed=1)
    thirds = Counter(int(one.time_s // 1200) for one in found)
    for third, share in enumerate((2 / 9, 5 / 9, 2 / 9)):
        expected = 1800 * share
        assert abs(thirds[third] - expected) <= 4 * math.sqrt(expected)
    counts = sorted(Counter(one.adapter for one in found).values(), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(1.5, rel=0.01)
    assert counts[1] / counts[2] == pytest.approx(1.5, rel=0.01)


def test_tenants_own_adapters():
    plain = synthetic(Gamma(5.0, 1.0), SHORT, SHORT, seed=4, requests=40)
    assert {one.tenant for one in assign_tenants(plain, ["x", "y"])} == {"x"}
    found = assign_tenants(assign_adapters(plain, Uniform(4), seed=0), ["x", "y"])
    owners = {one.adapter: one.tenant for one in found}
    assert [owners[name] for name in found.adapters] == ["x", "y", "x", "y"]
    assert all(one.tenant == owners[one.adapter] for one in found)
    with pytest.raises(BenchmarkError, match="no tenants"):
        assign_tenants(plain, [])

"""How requests are shared out, against the papers' definitions."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import (
    Distinct,
    Identical,
    Popularity,
    PowerLaw,
    Skewed,
    Uniform,
)

ALL = (Distinct(), Uniform(), Uniform(7), Skewed(), Skewed(3.0), Identical(), PowerLaw(50, 1.2))


@pytest.mark.parametrize("popularity", ALL, ids=str)
@given(requests=st.integers(1, 3000))
def test_counts_are_the_shares_to_within_a_request(popularity: Popularity, requests: int) -> None:
    shares, counts = popularity.shares(requests), popularity.counts(requests)
    assert math.fsum(shares) == pytest.approx(1.0)
    assert list(shares) == sorted(shares, reverse=True)
    assert sum(counts) == requests
    assert len(counts) == len(shares)
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - share * requests) < 1 + 1e-9
    assert list(counts) == sorted(counts, reverse=True)


def test_punica_s_four_of_64_requests() -> None:
    assert Distinct().counts(64) == (1,) * 64
    assert Uniform().counts(64) == (8,) * 8
    assert Identical().counts(64) == (64,)
    # (1.5⁸ − 1) / 0.5 = 49.3 requests are at least one each; a ninth adapter would take 74.9.
    assert len(Skewed().counts(64)) == 8
    assert len(Skewed().counts(75)) == 9


@given(requests=st.integers(1, 10_000))
def test_uniform_has_the_root_s_ceiling_of_adapters(requests: int) -> None:
    assert len(Uniform().counts(requests)) == math.ceil(math.sqrt(requests))


@given(requests=st.integers(1, 10**6), ratio=st.floats(1.1, 4.0))
def test_skewed_leaves_the_last_a_request_and_no_room_for_one_more(
    requests: int, ratio: float
) -> None:
    shares = Skewed(ratio).shares(requests)
    many = len(shares)
    for one, following in pairwise(shares):
        assert one / following == pytest.approx(ratio)
    assert shares[-1] * requests >= 1 - 1e-6
    assert sum(ratio**i for i in range(many + 1)) > requests * (1 - 1e-6)


def test_power_law() -> None:
    shares = PowerLaw(200, 1.0).shares(1)
    harmonic = math.fsum(1 / i for i in range(1, 201))
    assert shares[0] == pytest.approx(1 / harmonic)
    assert shares[9] == pytest.approx(shares[0] / 10)
    assert PowerLaw(4, 0.0).shares(1) == (0.25,) * 4
    assert PowerLaw(3, 2.0).shares(1) == pytest.approx((36 / 49, 9 / 49, 4 / 49))


def test_order_is_the_counts_shuffled_by_the_seed() -> None:
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
def test_refused(make, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        make()

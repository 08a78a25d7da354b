"""Lengths: their ranges and quantiles."""

import math
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import (
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Between,
    Fixed,
    Lengths,
    LogNormal,
)

MANY = 20_000


def drawn(lengths: Lengths, seed: int = 5) -> list[int]:
    random = Random(seed)
    return sorted(lengths.draw(random) for _ in range(MANY))


def share_up_to(found: list[int], length: float) -> float:
    return sum(one <= length for one in found) / len(found)


def test_fixed() -> None:
    assert drawn(Fixed(17)) == [17] * MANY


def test_between_is_uniform_and_has_both_ends() -> None:
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
def test_sharegpt_has_its_source_s_quantiles(lengths: LogNormal, median: int, p90: int) -> None:
    found = drawn(lengths)
    assert abs(share_up_to(found, median) - 0.5) <= 4 * math.sqrt(0.25 / MANY)
    assert abs(share_up_to(found, p90) - 0.9) <= 4 * math.sqrt(0.09 / MANY)


def test_logarithms_are_normal() -> None:
    lengths = LogNormal(5000, 12_000)
    logs = [math.log(one) for one in drawn(lengths)]
    sigma = math.log(12_000 / 5000) / 1.2815515655446004
    assert lengths.sigma == pytest.approx(sigma)
    assert abs(fmean(logs) - math.log(5000)) <= 4 * sigma / math.sqrt(MANY)
    assert abs(pstdev(logs) - sigma) <= 4 * sigma / math.sqrt(2 * MANY)


def test_a_cut_keeps_the_shape_below_it() -> None:
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
def test_lengths_are_whole_and_in_range(median: float, times: float, most: int | None) -> None:
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
def test_refused(make, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        make()

"""Margins hold at their percentile, for each kind by itself, and do not stay for ever."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.runtime.model.load import Load
from pcg.runtime.model.margins import Margins, StepKind, kind_of

DECODING = StepKind()
WITH_WINDOWS = StepKind(has_windows=True)


@given(st.lists(st.floats(-0.5, 3.0), min_size=16, max_size=200), st.sampled_from([90.0, 99.0]))
@settings(max_examples=60, deadline=None)
def test_the_margin_is_at_least_the_quantile_of_errors(
    errors: list[float], percentile: float
) -> None:
    """numpy's quantile "higher" is the oracle; what rises with surprises only adds to it."""
    margins = Margins(percentile)
    for error in errors:
        margins.observe(DECODING, error)
    least = np.quantile(errors, percentile / 100, method="higher")
    assert least <= margins.margin(DECODING) <= max(errors) + 0.02 * len(errors)


NOISES: dict[str, Callable[[Random, int], float]] = {
    "uniform": lambda random, i: random.uniform(-0.3, 0.3),
    "long tails": lambda random, i: random.lognormvariate(0.0, 1.0) / 10,
    "a drift": lambda random, i: i / 2000 + random.uniform(-0.05, 0.05),
    "jumps": lambda random, i: (i // 500) % 2 * 0.5 + random.uniform(-0.05, 0.05),
}


@pytest.mark.parametrize("noise", NOISES, ids=lambda name: str(name))
@pytest.mark.parametrize("percentile", [95.0, 99.0])
def test_errors_exceed_it_as_often_as_stated(noise: str, percentile: float) -> None:
    margins, random, above = Margins(percentile), Random(0), 0
    for i in range(4000):
        error = NOISES[noise](random, i)
        above += error > margins.margin(WITH_WINDOWS)
        margins.observe(WITH_WINDOWS, error)
        margins.pass_step()
    assert above / 4000 <= 1.25 * (1 - percentile / 100)


def test_exact_predictions_need_no_margin() -> None:
    margins = Margins()
    assert margins.margin(DECODING) == 0.1  # that of a kind that never ran
    for _ in range(300):
        margins.observe(DECODING, 0.0)
        assert 0.0 <= margins.margin(DECODING) <= 0.1
    assert margins.margin(DECODING) == 0.0
    assert margins.margin(WITH_WINDOWS) == 0.1


def test_one_hold_up_is_forgotten() -> None:
    """A window that took ten times as long would not fit again, and must not wait for ever."""
    margins = Margins()
    margins.observe(WITH_WINDOWS, 9.0)
    assert margins.margin(WITH_WINDOWS) >= 9.0
    for _ in range(2000):
        margins.pass_step()
    assert margins.margin(WITH_WINDOWS) == 0.1


def test_kinds() -> None:
    decoding = Load(5, 500, 5)
    prompt, window = Load.of(20, 0), Load.of_window(20, 0)
    expected = {
        decoding: StepKind(),
        decoding + prompt: StepKind(has_chunks=True),
        decoding + prompt + Load(sampled=20): StepKind(has_chunks=True),  # all its rows are read
        decoding + window: StepKind(has_windows=True),
        decoding + prompt + window: StepKind(has_chunks=True, has_windows=True),
    }
    for load, kind in expected.items():
        assert kind_of(load, decoding) == kind
    assert kind_of(Load(20, 200, ends=1), Load()) == StepKind(has_chunks=True, has_ends=True)

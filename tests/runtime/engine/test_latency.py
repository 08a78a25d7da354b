"""Latencies learn what work takes, begin with what calibration finds, and say what fits."""

from __future__ import annotations

from random import Random

import pytest

from pcg.runtime.engine.calibration import fitted_latencies
from pcg.runtime.engine.latency import Latency
from pcg.runtime.model.load import Load

TRUTH = (0.0154, 6.4e-4, 4e-7, 8e-4, 1.5e-3, 0.02)
"""Seconds of anything, a token, a key, a row of logits, a token's loss, a window."""


def took(load: Load) -> float:
    amounts = (1, load.tokens, load.keys, load.sampled, load.trained, load.windows)
    return sum(a * n for a, n in zip(TRUTH, amounts, strict=True))


def steps(count: int) -> list[Load]:
    """Some that decode, some with a prompt, and some with a window beside."""
    random = Random(0)
    found = []
    for _ in range(count):
        decoding = random.randrange(9)
        load = Load(decoding, decoding * random.randrange(20, 100), decoding)
        if random.random() < 0.3:
            load += Load.of(random.randrange(16, 65), 0) + Load(sampled=1)
        if random.random() < 0.4 or not load.tokens:
            load += Load.of_window(random.randrange(4, 129), random.randrange(128))
        found.append(load)
    return found


def test_rows_of_logits_and_windows_are_learned() -> None:
    """From estimates that are off by up to three; steps take up to 5 % less or more."""
    latency = Latency(0.02, 3e-4, 1e-6, 3e-4, 3e-3, 0.008)
    random = Random(1)
    for load in steps(600):
        latency.observe(load, took(load) * random.uniform(0.95, 1.05))
    for load in steps(50):
        assert latency.seconds(load) == pytest.approx(took(load), rel=0.06)
    alike = (Load(8, 500, 8), Load(8, 500), Load(72, 500, 8), Load(72, 500, 8, 64, 1))
    for load in alike:
        assert latency.seconds(load) == pytest.approx(took(load), rel=0.1)


def test_what_takes_nothing_by_the_estimate_is_not_learned() -> None:
    latency = Latency(0.01, 1e-4, 1e-7)
    for load in steps(300):
        latency.observe(load, took(load))
    assert latency.coefficients_s[3:] == (0.0, 0.0, 0.0)
    assert latency.seconds(Load(5, 100, 5)) == latency.seconds(Load(5, 100, 0, 5, 1))


def test_the_most_tokens_that_fit() -> None:
    """One more does not; a window's own time and a prompt's row are in what is beside."""
    latency = Latency(*TRUTH)
    beside = Load(8, 500, 8) + Load(windows=1)
    for context in (0, 100, 5000):
        fitting = latency.tokens_within(0.2, context, beside, is_trained=True)
        wholes = [Load(8, 500, 8) + Load.of_window(fitting + i, context) for i in (0, 1)]
        assert latency.seconds(wholes[0]) <= 0.2 < latency.seconds(wholes[1])
        fitting = latency.tokens_within(0.2, context, Load(sampled=1))
        prompts = [Load.of(fitting + i, context) + Load(sampled=1) for i in (0, 1)]
        assert latency.seconds(prompts[0]) <= 0.2 < latency.seconds(prompts[1])
    assert latency.tokens_within(0.03, 0, beside, is_trained=True) == 0


def test_calibration_tells_rows_of_logits_from_tokens() -> None:
    """A head of 6 ms, which is read for the first row of logits, and twice for a window."""

    def seconds(tokens: int, context: int, rows: int) -> float:
        load = Load.of(tokens, context)
        return 0.01 + 6e-4 * load.tokens + 4e-7 * load.keys + 8e-4 * rows + 0.006 * (rows > 0)

    found = fitted_latencies(seconds, layers=8)
    expected = (0.016, 6e-4, 4e-7, 8e-4, 1.6e-3, 0.0136)
    assert found.forward.coefficients_s == pytest.approx(expected, rel=1e-6)
    assert found.backward.coefficients_s[:3] == pytest.approx((0.002, 1.5e-4, 1e-7))

"""Latencies learn what work takes, begin with what calibration finds, and say what fits."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from pcg.runtime.admission.latency import Latency, Reserve
from pcg.runtime.engine.device.calibration import fitted_latencies
from pcg.runtime.requests.step import Load

TRUTH = (0.0154, 6.4e-4, 4e-7, 8e-4, 1.5e-3, 0.02)
"""Seconds of anything, a token, a key, a row of logits, a token's loss, a window."""


def window(tokens: int, context: int) -> Load:
    return Load.of(tokens, context) + Load(trained=tokens, windows=1)


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
            load += window(random.randrange(4, 129), random.randrange(128))
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


def replays(load: Load, was_recorded: bool) -> tuple[float, bool]:
    """A device whose steps begin in 0.4 ms or 1.5 ms replayed, and in 15.4 ms eagerly."""
    is_replayed = load.only_decodes or was_recorded
    begins_s = (4e-4 if load.only_decodes else 1.5e-3) if is_replayed else TRUTH[0]
    return took(load) - TRUTH[0] + begins_s, is_replayed


def test_each_kind_of_step_has_an_intercept() -> None:
    """First all is eager; then what decodes is replayed, and at last windows and prompts, too."""
    latency = Latency(0.02, 3e-4, 1e-6, 3e-4, 3e-3, 0.008)
    random = Random(1)
    prompts = Load(chunks=1)
    for number, load in enumerate(steps(900)):
        load += prompts if load.tokens > load.sampled and not load.windows else Load()
        took_s, is_replayed = replays(load, number >= 600)
        if number < 200:
            took_s, is_replayed = took(load), False
        latency.observe(load, took_s * random.uniform(0.97, 1.03), is_replayed)
        if number in (199, 599, 899):
            for other in steps(60):
                other += prompts if other.tokens > other.sampled and not other.windows else Load()
                took_s, _ = (took(other), False) if number < 200 else replays(other, number > 600)
                assert latency.seconds(other) == pytest.approx(took_s, rel=0.05), number


def test_a_kind_that_is_eager_again_has_its_own_intercept() -> None:
    """As where an adapter comes that no graph serves: it is known from before."""
    latency, load = Latency(0.01, 1e-4, 1e-8), Load(8, 800, 8)
    for is_replayed, took_s in ((False, 0.017), (True, 0.004)):
        for _ in range(100):
            latency.observe(load, took_s, is_replayed)
        assert latency.seconds(load) == pytest.approx(took_s, rel=0.02)
    latency.observe(load, 0.017, False)
    assert latency.seconds(load) == pytest.approx(0.017, rel=0.05)


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
        wholes = [Load(8, 500, 8) + window(fitting + i, context) for i in (0, 1)]
        assert latency.seconds(wholes[0]) <= 0.2 < latency.seconds(wholes[1])
        fitting = latency.tokens_within(0.2, context, Load(sampled=1))
        prompts = [Load.of(fitting + i, context) + Load(sampled=1) for i in (0, 1)]
        assert latency.seconds(prompts[0]) <= 0.2 < latency.seconds(prompts[1])
    assert latency.tokens_within(0.03, 0, beside, is_trained=True) == 0


def test_calibration_tells_rows_of_logits_from_tokens() -> None:
    """A head of 6 ms, which is read for the first row of logits, and a row of many costs less."""

    def seconds(tokens: int, context: int, rows: int) -> float:
        load = Load.of(tokens, context)
        return 0.01 + 6e-4 * load.tokens + 4e-7 * load.keys + 8e-4 * rows + 0.006 * (rows > 0)

    found = fitted_latencies(seconds, layers=8)
    expected = (0.016, 6e-4, 4e-7, 8e-4, 3e-5, 8e-4)
    assert found.forward.coefficients_s == pytest.approx(expected, rel=1e-6)
    of_rows = 2 * (8e-4 * 64 + 0.006) / 64
    assert found.loss.coefficients_s[:3] == pytest.approx((0.0068, of_rows, 0.0))
    assert found.backward.coefficients_s[:3] == pytest.approx((0.002, 1.5e-4, 1e-7))


def _on_gpu(tokens: int, context: int, rows: int) -> float:
    """A step that reads its weights for 10 ms, in which 130 tokens are computed."""
    load = Load.of(tokens, context)
    return 2e-3 + max(0.01, tokens * 0.01 / 130) + 1e-5 * tokens + 1e-9 * load.keys + 1e-4 * rows


def test_calibration_finds_the_knee() -> None:
    found = fitted_latencies(_on_gpu, layers=10, many=512)
    for latency, parts in ((found.forward, 1), (found.backward, 5), (found.layer, 10)):
        assert latency.knee.tokens == 130
        assert latency.knee.token_s == pytest.approx(0.01 / 130 / parts)
    for tokens in (1, 64, 130, 200, 2000):
        took_s = _on_gpu(tokens, 500, 1)
        # Reading keys once is supposed to take something, too.
        predicted_s = found.forward.seconds(Load.of(tokens, 500) + Load(sampled=1))
        assert predicted_s == pytest.approx(took_s, rel=1e-3)
    assert found.layer.seconds(Load(200)) == pytest.approx(_on_gpu(200, 0, 0) / 10, rel=0.01)
    assert not fitted_latencies(_on_gpu, layers=10).forward.knee.tokens


@pytest.mark.parametrize("beside", [Load(), Load(100), Load(400)])
def test_what_fits_around_a_knee_ends_in_time(beside: Load) -> None:
    """Tokens that a time has room for, one more than which it has not."""
    latency = Latency(0.01, 1e-5, 1e-9, beyond_s=1e-4, knee=130)
    for seconds in (0.0108, 0.0113, 0.015, 0.06):
        fitting = latency.tokens_within(seconds, 300, beside)
        more = [beside + Load.of(fitting + i, 300) for i in (0, 1)]
        assert latency.seconds(more[1]) > seconds
        assert not fitting or latency.seconds(more[0]) <= seconds


def test_a_knee_is_learned() -> None:
    """Tokens before it cost a tenth of what those beyond do, and both were guessed wrongly."""
    latency = Latency(1e-4, 2e-6, 1e-10, beyond_s=1e-6, knee=140)
    drawn = Random(0)
    for _ in range(400):
        load = Load.of(drawn.choice((40, 100, 150, 170, 300)), drawn.randrange(4000))
        took_s = 3e-4 + 3e-7 * load.tokens + 2e-10 * load.keys + 3e-6 * max(0, load.tokens - 140)
        latency.observe(load, took_s)
    assert latency.knee.token_s == pytest.approx(3e-6, rel=0.02)
    assert latency.coefficients_s[1] == pytest.approx(3e-7, rel=0.1)


@pytest.mark.parametrize("percentile", [90.0, 99.0])
def test_a_reserve_keeps_the_share_of_gaps_that_is_asked_for(percentile: float) -> None:
    """Steps are filled up to the reserve and take up to 0.4 longer; errors drift on the way."""
    reserve, random, missed = Reserve(), Random(0), 0
    for i in range(20_000):
        spread = 0.4 if i < 10_000 else 0.1
        used = reserve.within(1.0) * random.uniform(1 - spread, 1 + spread)
        missed += used > 1
        reserve.observe(used > 1, percentile)
    # Half of what may be missed is aimed at.
    assert missed / 20_000 == pytest.approx((1 - percentile / 100) / 2, rel=0.2)


def test_no_errors_leave_work_without_time() -> None:
    reserve = Reserve()
    for _ in range(1000):
        reserve.observe(True, 99.0)
    assert reserve.within(1.0) == 0.5


def test_latencies_find_back_from_loads_that_are_far_shorter() -> None:
    """Sixty units of almost nothing teach what is wrong for all others, and no more than that."""
    latency = Latency(3.4e-4, 2.3e-6, 3.1e-10)
    loads = [Load.of(128, 128 * i) for i in range(64)]
    for turn in range(6):
        for i in range(640):
            load = loads[i % 64]
            long_s = 3.5e-4 + 8e-7 * load.tokens + 1.6e-10 * load.keys
            latency.observe(load, long_s if i < 576 else 2e-5)
            if 300 < i < 576 and turn:
                assert latency.seconds(load) == pytest.approx(long_s, rel=0.1)


def test_ends_of_passes_teach_their_own_coefficient_alone() -> None:
    """They are shorter, as the first layer needs no gradient of its inputs, or have an update."""
    latency = Latency(3.4e-4, 2.3e-6, 3.1e-10)
    before, end = latency.coefficients_s, dataclasses.replace(Load.of(128, 0), ends=1)
    for _ in range(20):
        latency.observe(end, 2e-5)
    assert latency.coefficients_s == before
    for _ in range(200):
        latency.observe(end, 5e-3)
    assert latency.coefficients_s == before
    assert latency.seconds(end) == pytest.approx(5e-3, rel=0.1)
    latency.observe(Load.of(128, 0), 2e-5)
    assert latency.coefficients_s != before

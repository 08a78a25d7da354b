"""What may wait, and what steps are predicted to take."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.admission.latency import Latencies, Latency, Reserve
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device.calibration import fitted_latencies
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.step import Load
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts
from tests.support.small_engine import LENGTHS, expected, make_engine, make_executor, requests, run


def ask(tenant: str = "", prompt: int = 10, **fields: Any) -> Request:
    return Request((1,) * prompt, SamplingParams(max_new_tokens=3), tenant=tenant, **fields)


def simulated(**queue: int | None) -> SimulatedEngine:
    latencies = Latencies(Latency(0.01, 1e-4, 1e-8), Latency(0.01, 1e-4, 1e-8))
    limits = Limits(running=2, tpot_slo_s=0.1)
    limits_of_queue = QueueLimits(**queue)
    engine = SimulatedEngine(
        LinearCosts(), 64, 1000, limits, latencies=latencies, queue=limits_of_queue
    )
    for _ in range(2):
        engine.submit(ask("first"))
    engine.step()  # both of them run, and nothing waits
    return engine


@pytest.mark.parametrize(
    ("queue", "tenant", "message"),
    [
        ({"requests": 5}, "", "5 requests wait, and 5 may"),
        ({"requests": 5}, "b", "5 requests wait, and 5 may"),
        ({"tokens": 55}, "b", "5 requests with 50 tokens wait, 10 came, and 55 may wait"),
        ({"tenant_requests": 5}, "a", "5 requests of tenant 'a' wait, and 5 may"),
        ({"tenant_tokens": 55}, "a", "5 requests of tenant 'a' with 50 tokens wait, 10 came"),
    ],
)
def test_a_full_queue_refuses(queue: dict[str, int], tenant: str, message: str) -> None:
    engine = simulated(**queue)
    for _ in range(5):
        engine.submit(ask("a"))
    with pytest.raises(QueueFullError, match=message) as refused:
        engine.submit(ask(tenant))
    assert "ask again later" in str(refused.value)
    assert [event.kind for event in engine.log][-1] is Kind.REFUSED
    if "tenant" in message:
        engine.submit(ask("b"))  # the others have their own
    run(engine)
    engine.submit(ask(tenant))
    assert serving_report(engine.log).to_json()["refused"] == 1


def test_ten_thousand_requests_are_not_all_queued() -> None:
    """By default, in an engine of a model."""
    engine = make_engine(make_executor())
    request = Request((1, 2), SamplingParams(max_new_tokens=1))
    for _ in range(4096):
        engine.submit(request)
    with pytest.raises(QueueFullError, match="4096 requests wait, and 4096 may"):
        engine.submit(request)
    with pytest.raises(GenerationError, match="requests=0; use an int of at least 1, or None"):
        QueueLimits(requests=0)


def test_generate_beside_an_engine_asks_for_no_more_than_fits() -> None:
    executor = make_executor()
    asked = requests(executor, (*LENGTHS, 3, 8))
    fields: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    engine = executor.engine(Limits(running=1), queue=QueueLimits(requests=2), kv_cache_bytes=2**20)
    with engine.start():
        prompts = [list(request.prompt_ids) for request in asked]
        found = executor.generate(prompts, ["a", None] * 4, **fields)
    assert [list(one.token_ids) for one in found] == expected(asked)


def test_an_slo_that_no_step_keeps_is_refused() -> None:
    """A step with a token of it, and 16 of somebody's prompt: 0.01 + 17 * 1e-4 s."""
    engine = simulated()
    with pytest.raises(GenerationError, match=r"tpot_slo_s=1e-09 of .* a step .* to take 0\.0117"):
        engine.submit(ask(tpot_slo_s=1e-9))
    with pytest.raises(GenerationError, match=r"ttft_slo_s=1e-09 of .* take 0\.0101 s; ask for"):
        engine.submit(ask(ttft_slo_s=1e-9))
    engine.submit(ask(tpot_slo_s=0.02, ttft_slo_s=1.0))
    limits = Limits(tpot_slo_s=0.1, least_tpot_slo_s=0.05)
    latencies = Latencies(Latency(0.01, 1e-4, 1e-8), Latency(0.01, 1e-4, 1e-8))
    strict = SimulatedEngine(LinearCosts(), 64, 1000, limits, latencies=latencies)
    with pytest.raises(GenerationError, match=r"this engine takes none below 0\.05 s"):
        strict.submit(ask(tpot_slo_s=0.02))
    strict.submit(ask(tpot_slo_s=0.05))


def test_a_request_has_one_name_everywhere() -> None:
    engine = make_engine(make_executor())
    names = [engine.submit(Request((1, 2), SamplingParams(max_new_tokens=2))) for _ in range(2)]
    names.append(engine.submit(ask(request_id="cmpl-7")))
    assert names == ["request 0", "request 1", "cmpl-7"]
    with pytest.raises(GenerationError, match="there is a request 'cmpl-7' already"):
        engine.submit(ask(request_id="cmpl-7"))
    chunks: list[Chunk] = []
    while not engine.is_idle:
        chunks += engine.step()
    assert {chunk.request_id for chunk in chunks} == set(names)
    assert engine.log.of("cmpl-7")[-1].kind is Kind.FINISHED
    # It is free again then, and metrics know both.
    engine.submit(ask(request_id="cmpl-7"))
    engine.cancel("cmpl-7")
    assert [chunk.request_id for chunk in engine.step()] == ["cmpl-7"]
    assert [one.request for one in serving_report(engine.log).requests] == [*names, "cmpl-7"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": 7}, "request_id=7; use a text"),
        ({"request_id": "a\nb"}, "use at most 256 characters that can be printed"),
        ({"request_id": "x" * 257}, "use at most 256 characters"),
        ({"request_id": "request 3"}, "begins with 'request ', as those do that the engine makes"),
        ({"priority": "high"}, "priority='high'; use an int"),
        ({"priority": True}, "priority=True; use an int"),
        ({"priority": 0.5}, "priority=0.5; use an int"),
    ],
)
def test_bad_names_and_priorities(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        ask(**fields)


def test_continuations_count_as_they_come() -> None:
    """Not those of a prompt that was computed, and not those that were put back."""
    engine = simulated(requests=19, tenant_requests=5)
    several = SamplingParams(max_new_tokens=3, n=4, temperature=1.0)
    engine.submit(Request((1,) * 10, several, tenant="a"))
    with pytest.raises(QueueFullError, match="4 requests of tenant 'a' wait, 4 came, and 5 may"):
        engine.submit(Request((1,) * 10, several, tenant="a"))
    more = SamplingParams(max_new_tokens=3, n=6, temperature=1.0)
    with pytest.raises(QueueFullError, match="0 requests of tenant 'b' wait, 6 came, and 5 may"):
        engine.submit(Request((1,), more, tenant="b"))  # or one request would fill the queue
    engine.submit(ask("a"))
    engine.cancel("request 0")
    engine.cancel("request 1")
    while "request 2" in {sequence.id for sequence in engine.scheduler.waiting}:
        engine.step()
    assert len(engine.scheduler.waiting) == 3  # of four: two requests run, as many as may
    assert engine.scheduler.backlog.requests == 0
    for _ in range(5):
        engine.submit(ask("a"))
    engine.submit(ask("b"))
    run(engine)


# --------------------------------------------------------------------------------------- latencies

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

"""What may wait, and what is refused: full queues, unreachable SLOs, names that are taken."""

from __future__ import annotations

from typing import Any

import pytest

from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts
from tests.support.small_engine import LENGTHS, expected, make_engine, make_executor, requests


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
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    engine.submit(ask(tenant))
    assert serving_report(engine.log).to_json()["refused"] == 1


def test_any_length_is_taken_where_nothing_waits() -> None:
    engine = simulated(tokens=20)
    engine.submit(ask("a", 100))
    with pytest.raises(QueueFullError):
        engine.submit(ask("a", 1))
    while not engine.is_idle:
        engine.step()


def test_ten_thousand_requests_are_not_all_queued() -> None:
    """By default, in an engine of a model."""
    engine = make_engine(make_executor(), 64)
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
    engine = make_engine(make_executor(), 64)
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
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()

"""Replaying a workload: everything comes when it should, and the report is of it all."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pcg.errors import BenchmarkError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import Outcome, ServingReport
from pcg.simulate.replay import replay, train
from pcg.simulate.workload import TimedRequest, Workload
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor

WORKLOAD = Workload(
    (
        TimedRequest(0.0, None, 9, 12),
        TimedRequest(0.05, "a", 4, 6, "t"),
        TimedRequest(0.05, "a", 30, 1),
        TimedRequest(0.9, None, 5, 8, "t"),
    )
)


def test_requests_come_when_their_time_has_come() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(ttft_slo_s=50.0))
    report = replay(engine, WORKLOAD, executor.adapters, 128)
    assert engine.is_idle
    assert report.count(Outcome.FINISHED) == 4
    assert [line.output_tokens for line in report.requests] == [12, 6, 1, 8]
    assert [line.prompt_tokens for line in report.requests] == [9, 4, 30, 5]
    assert [line.adapter for line in report.requests] == [None, "a", "a", None]
    times = [line.submitted_s - report.start_s for line in report.requests]
    assert times == pytest.approx([0.0, 0.05, 0.05, 0.9], abs=1e-9)
    for line in report.requests:
        assert line.ttft_s is not None
        assert line.ttft_s > 0
    assert report.output_tokens == 27
    assert report.slo_attainment == 1.0
    assert report.duration_s > 0.9


def test_prompts_are_those_of_the_seed() -> None:
    def prompts(seed: int) -> list[tuple[int, ...]]:
        executor = make_executor()
        engine = make_engine(executor, 64)
        found = []
        submit = engine.submit

        def seen(request, came_s=None):  # type: ignore[no-untyped-def]
            found.append(request.prompt_ids)
            return submit(request, came_s)

        engine.submit = seen  # type: ignore[method-assign]
        replay(engine, WORKLOAD.part(0.0, 0.1), executor.adapters, 128, seed=seed)
        return found

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)
    assert all(0 <= token < 128 for prompt in prompts(1) for token in prompt)


def until_trained(run: Callable[[], ServingReport]) -> ServingReport:
    """Run until a job has done a step meanwhile, as it does at once where nobody else computes."""
    return next(report for _ in range(60) if (report := run()).finetuning_steps)


def test_jobs_train_beside_and_alone() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(tpot_slo_s=0.5))
    options = {**OPTIONS, "max_steps": 10_000}
    engine.finetune(DATA, "trained", peft=LORA, **options)
    report = until_trained(lambda: replay(engine, WORKLOAD, executor.adapters, 128))
    assert report.finetuning_throughput > 0
    assert len(engine.jobs) == 1
    began = time.monotonic()
    alone = until_trained(lambda: train(engine, 0.5))
    assert 0.5 <= alone.duration_s <= time.monotonic() - began
    assert not alone.requests
    engine.cancel_job("trained")
    with pytest.raises(BenchmarkError, match="no finetuning job"):
        train(engine, 1.0)


def test_a_refusal_is_in_the_report() -> None:
    executor = make_executor()
    engine = make_engine(executor, 4)
    workload = Workload((TimedRequest(0.0, None, 100, 4), TimedRequest(0.0, None, 10, 4)))
    report = replay(engine, workload, {}, 128)
    assert [line.outcome for line in report.requests] == [Outcome.REFUSED, Outcome.FINISHED]


def test_what_cannot_be_replayed() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    with pytest.raises(BenchmarkError, match="asks for adapter 'a', the first of 1"):
        replay(engine, WORKLOAD, {}, 128)
    long = Workload((TimedRequest(0.0, None, 100, 29),))
    with pytest.raises(BenchmarkError, match="has 100 tokens and asks for 29, and the model"):
        replay(engine, long, {}, 128, most_positions=128)
    assert all(event.kind is not Kind.SUBMITTED for event in engine.log)


def test_requests_that_can_never_run_end_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused job holds pages that a request needs."""
    executor = make_executor()
    engine = make_engine(executor, 8)
    engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    while not engine.jobs[0].tables:
        engine.step()
    engine.pause_job("trained")
    free = engine.pool.free
    table = engine.pool.open("a test", 0)
    engine.pool.extend(table, free)
    monkeypatch.setattr("pcg.simulate.replay._MOST_STUCK", 20)
    with pytest.raises(BenchmarkError, match="1 requests wait, and none can run: 0 of 8 pages"):
        replay(engine, Workload((TimedRequest(0.0, None, 9, 2),)), {}, 128)

"""What an engine on a thread tells of itself, and how it ends its work."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from pcg.errors import (
    AdapterError,
    DrainingError,
    EngineError,
    FinetuneError,
    FinetuneInterrupted,
)
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.metrics.status import EngineState, JobState
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor
from tests.support.step_gate import StepGate
from tests.support.waiting import until

SHORT: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
LONG_JOB: dict[str, Any] = {**OPTIONS, "max_steps": 50}


def ends_behind_tokens(log: Iterable[Event]) -> list[float]:
    """Times between the last token of a request and its end, seconds."""
    last_s: dict[str, float] = {}
    found = []
    for event in log:
        if event.kind is Kind.TOKEN:
            last_s[event.subject] = event.time_s
        elif event.kind is Kind.FINISHED:
            found.append(event.time_s - last_s[event.subject])
    return found


def test_numbers_are_those_of_a_report() -> None:
    engine = make_engine(make_executor(), 64, Limits(tokens=20))
    with engine.start() as running:
        job = running.finetune(DATA, "one", peft=LORA, **OPTIONS)
        streams = [running.submit([*range(1, 20 + i)], **SHORT) for i in range(4)]
        late = running.submit([1, 2], timeout_s=1e-6, **SHORT)
        for stream in (*streams, late):
            stream.wait(60)
        again = running.submit([*range(1, 40)], **SHORT)
        again.wait(60)
        job.wait(60)
        numbers = running.numbers()
    report, totals = serving_report(engine.log), numbers.totals
    assert dict(totals.requests) == {"finished": 5, "timed_out": 1}
    assert totals.output_tokens == report.output_tokens == 60
    assert totals.prompt_tokens == report.input_tokens
    assert totals.cached_tokens == report.cached_tokens > 0
    assert totals.finetuning_tokens == sum(report.finetuning_tokens.values())
    assert totals.finetuning_steps == report.finetuning_steps == 3
    for name in ("ttft", "tpot", "e2el"):
        mine, theirs = getattr(totals, name), getattr(report, name)
        assert mine.count == theirs.count == 5
        behind_s = mean(ends_behind_tokens(engine.log)) / 11 if name == "tpot" else 0.0
        assert mine.mean == pytest.approx(theirs.mean_s + behind_s)
    assert (numbers.waiting, numbers.running, numbers.waiting_tokens) == (0, 0, 0)
    assert numbers.free_pages == numbers.pages == 64
    assert not numbers.jobs


def test_adapters_are_listed_and_removed() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    gate = StepGate(engine)
    with engine.start() as running:
        (one,) = running.adapters()
        assert (one.name, one.method, one.pages, one.running) == ("a", "LoRA", 0, 0)
        assert one.size_bytes == executor.adapters["a"].size_bytes
        stream = running.submit([1, 2], "a", **LONG)
        gate.let()
        next(stream)
        (used,) = running.adapters()
        assert used.running == 1
        assert used.pages > 0
        running.remove_adapter("a").result(60)
        assert running.adapters() == []
        with pytest.raises(AdapterError, match="there is no adapter 'a'"):
            running.submit([1, 2], "a", **LONG)
        with pytest.raises(AdapterError, match="there is no adapter 'a'"):
            running.remove_adapter("a").result(60)
        gate.let()
        assert next(stream).token_id is not None
        stream.cancel()
        job = running.finetune(DATA, "b", peft=LORA, publish_every=1, **LONG_JOB)
        gate.let_until(lambda: any(one.name == "b" for one in running.adapters()))
        assert running.adapters()[0].is_trained
        with pytest.raises(AdapterError, match="a job trains adapter 'b'"):
            running.remove_adapter("b").result(60)
        job.cancel()


def test_jobs_are_listed_with_their_progress(tmp_path: Path) -> None:
    engine = make_engine(make_executor(), 64, Limits(tokens=20))
    with engine.start() as running:
        options = {**OPTIONS, "checkpoint_dir": tmp_path / "c", "save_every": 1}
        first = running.finetune(DATA, "first", peft=LORA, **options)
        result = first.wait(60)
        bad = running.finetune([{"text": "needs a tokenizer"}], "bad")
        with pytest.raises(FinetuneError):
            bad.wait(60)
        held = running.finetune(DATA, "held", peft=LORA, **LONG_JOB)
        held.pause()
        until(lambda: held.state is JobState.PAUSED)
        status, failed, paused = running.jobs()
        assert (status.name, status.state, status.error) == ("first", JobState.SUCCEEDED, None)
        assert (status.step, status.total_steps, status.loss) == (3, 3, result.losses[-1])
        assert status.checkpoint == result.checkpoint
        assert (failed.name, failed.state) == ("bad", JobState.FAILED)
        assert "came without a tokenizer" in str(failed.error)
        assert (paused.name, paused.state) == ("held", JobState.PAUSED)
        assert (paused.error, paused.checkpoint) == (None, None)
        assert running.numbers().jobs == {JobState.PAUSED: 1}
        for number in range(80):
            running.finetune([{"text": ""}], f"bad {number}")
        until(lambda: all(one.is_over for one in running._jobs.listed if one is not held))
        running.finetune([{"text": ""}], "last")
        names = [one.name for one in running.jobs()]
        assert names[0] == "held"
        assert names[-1] == "last"
        assert len(names) == 66


def test_health_tells_of_a_step_that_hangs() -> None:
    engine = make_engine(make_executor(), 64)
    step, go = engine.step, threading.Event()
    engine.step = lambda: step() if go.wait(60) else []  # type: ignore[method-assign]
    running = engine.start()
    assert running.health().state is EngineState.RUNNING
    assert running.health().step_s is None
    stream = running.submit([1, 2], **SHORT)
    until(lambda: (running.health().step_s or 0.0) > 0.1)
    go.set()
    stream.cancel()
    running.close()
    health = running.health()
    assert (health.state, health.step_s) == (EngineState.ENDED, None)
    assert "the engine was closed" in str(health.error)


def test_draining_ends_what_is_there_and_takes_nothing_new(tmp_path: Path) -> None:
    """Requests run to their ends; a job is resumed elsewhere as if nothing had happened."""
    executor, alone = make_executor(), make_executor()
    whole = alone.finetune(DATA, "kept", peft=LORA, progress=False, **{**OPTIONS, "max_steps": 6})
    engine = make_engine(executor, 64, Limits(tokens=20, running=2))
    gate = StepGate(engine)
    options = {**OPTIONS, "max_steps": 6, "checkpoint_dir": tmp_path / "c"}
    with engine.start() as running:
        kept = running.finetune(DATA, "kept", peft=LORA, **options)
        lost = running.finetune(DATA, "lost", peft=LORA, **LONG_JOB)
        gate.let_until(lambda: all(job.step for job in running.jobs()))
        kept.pause()
        streams = [running.submit([1, 2, i], **SHORT) for i in range(1, 5)]
        drained = running.drain()
        assert running.health().state is EngineState.DRAINING
        for ask in (
            lambda: running.submit([1], **SHORT),
            lambda: running.finetune(DATA, "new", peft=LORA, **OPTIONS),
            lambda: running.add_adapter("new", LORA),
        ):
            with pytest.raises(DrainingError, match="takes nothing new"):
                ask()
        gate.open()
        drained.result(60)
        assert [len(stream.wait(0).token_ids) for stream in streams] == [12] * 4
        with pytest.raises(FinetuneInterrupted, match="run the same call again") as interrupted:
            kept.wait(0)
        with pytest.raises(FinetuneInterrupted, match="Give checkpoint_dir to be able to resume"):
            lost.wait(0)
        status = running.jobs()[0]
        assert (status.state, status.checkpoint) == (
            JobState.CANCELLED,
            interrupted.value.checkpoint,
        )
        assert status.checkpoint is not None
        assert 1 <= status.step < 6
        assert running.drain().done()
        numbers = running.numbers()
        assert (numbers.waiting, numbers.running, dict(numbers.jobs)) == (0, 0, {})
        assert running.call(lambda: 1).result(60) == 1
    with make_engine(make_executor(), 64).start() as other:
        resumed = other.finetune(DATA, "kept", peft=LORA, **options).wait(60)
    assert resumed.resumed_from == status.step
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-4)


def test_draining_gives_up_what_takes_too_long() -> None:
    engine = make_engine(make_executor(), 64)
    gate = StepGate(engine)
    with engine.start() as running:
        stream = running.submit([1, 2], **LONG)
        job = running.finetune(DATA, "one", peft=LORA, **LONG_JOB)
        gate.let_until(lambda: job.state is JobState.RUNNING)
        gate.let_until(lambda: stream.first_chunk_s is not None)
        next(stream)
        with pytest.raises(EngineError, match="timeout_s=0; use seconds above 0"):
            running.drain(0)
        running.drain(timeout_s=0.2).result(60)
        assert stream.wait(0).finish_reason == "timed_out"
        with pytest.raises(FinetuneError):
            job.wait(0)
    engine.check_integrity()


def test_an_engine_that_ends_is_drained() -> None:
    running = make_engine(make_executor(), 64).start()
    running.close()
    assert running.drain().done()

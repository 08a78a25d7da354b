"""The engine on a thread: everyone who waits hears of the end, whatever it is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import (
    AdapterError,
    EngineError,
    FinetuneError,
    GenerationError,
    OutOfMemoryError,
    PcgError,
)
from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor, ServingProgram
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Chunk, Completion
from pcg.runtime.requests.stream import Stream
from tests.support.prompts import prompts
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    NEW,
    OPTIONS,
    expected,
    make_engine,
    make_executor,
    requests,
)
from tests.support.started_steps import nothing, when_read
from tests.support.step_gate import StepGate
from tests.support.waiting import until

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
LONG_JOB: dict[str, Any] = {**OPTIONS, "max_steps": 50}


@contextmanager
def started(
    executor: Executor, pages: int = 64, limits: Limits | None = None
) -> Iterator[AsyncEngine]:
    with make_engine(executor, pages, limits).start() as async_engine:
        yield async_engine
    assert not async_engine._thread.is_alive()
    async_engine.engine.check_integrity()
    assert not async_engine.engine.scheduler.running


def submitted(async_engine: AsyncEngine) -> list[Stream]:
    """The requests of `test_engine.requests`, by the name of the adapter."""
    return [
        async_engine.submit(prompt, ("a", None)[i % 2], **GREEDY)
        for i, prompt in enumerate(prompts(LENGTHS))
    ]


def test_threads_read_streams() -> None:
    executor = make_executor()
    with started(executor) as async_engine:
        streams = submitted(async_engine)
        tokens = [[chunk.token_id for chunk in stream] for stream in streams]
        done = [stream.wait() for stream in streams]
    assert tokens == expected(requests(executor, LENGTHS))
    assert [list(completion.token_ids) for completion in done] == tokens


def test_coroutines_read_streams_beside_a_job() -> None:
    """Several readers of one loop, in any order, and a job that ends with the adapter as alone."""
    executor, alone = make_executor(), make_executor()
    alone.finetune(DATA, "trained", peft=LORA, progress=False, **OPTIONS)

    async def read(stream: Stream) -> list[int | None]:
        tokens = [chunk.token_id async for chunk in stream]
        assert [chunk async for chunk in stream] == []
        return tokens

    async def main() -> list[list[int | None]]:
        async with make_engine(executor, 64, Limits(tokens=20)).start() as async_engine:
            job = async_engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
            streams = submitted(async_engine)
            found = await asyncio.gather(*map(read, streams))
            await asyncio.gather(*(stream.completion() for stream in streams))
            assert (await job.result()).steps == 3
            assert job.state is JobState.SUCCEEDED
            completion = await async_engine.submit([1, 2], "trained", **GREEDY).completion()
            assert completion.adapter == "trained"
        return found

    assert asyncio.run(main()) == expected(requests(executor, LENGTHS))
    ours, theirs = (e.adapters["trained"].tensors for e in (executor, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_requests_that_are_given_up() -> None:
    engine = make_engine(make_executor(), 64)
    gate = StepGate(engine)
    with engine.start() as async_engine:
        stream = async_engine.submit([1, 2, 3], **LONG)
        gate.let()
        first = next(stream)
        stream.cancel()
        gate.open()
        rest = list(stream)
        assert first.completion is None
        assert rest[-1].completion is not None
        assert rest[-1].completion.finish_reason == "cancelled"
        stream.cancel()
        late = async_engine.submit([1, 2, 3], timeout_s=1e-6, **LONG)
        assert late.wait(60).finish_reason == "timed_out"
    engine.check_integrity()


def test_a_reader_that_stops_waiting_ends_nothing() -> None:
    engine = make_engine(make_executor(), 64)
    gate = StepGate(engine)

    async def main(async_engine: AsyncEngine) -> Completion:
        stream = async_engine.submit([1, 2, 3], **LONG)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.completion(), 1e-3)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        gate.open()
        return await stream.completion()

    with engine.start() as async_engine:
        assert len(asyncio.run(main(async_engine)).token_ids) == 100


def test_what_is_refused() -> None:
    executor = make_executor()
    with started(executor, pages=4) as async_engine:
        with pytest.raises(AdapterError, match="there is no adapter 'b'; there are: a"):
            async_engine.submit([1], "b")
        with pytest.raises(GenerationError, match="came without a tokenizer"):
            async_engine.submit("text")
        big = async_engine.submit(range(1, 101), max_new_tokens=4)
        with pytest.raises(OutOfMemoryError, match="needs 7 pages, and the engine has 4"):
            next(big)
        with pytest.raises(OutOfMemoryError, match="needs 7 pages"):
            asyncio.run(big.completion())
        with pytest.raises(GenerationError, match="prompt 1 has no tokens"):
            async_engine.submit([]).wait(60)
        with pytest.raises(FinetuneError, match="came without a tokenizer"):
            async_engine.finetune([{"text": "a"}], "b").wait(60)
        assert len(async_engine.submit([1, 2], **GREEDY).wait(60).token_ids) == NEW


def test_jobs_pause_resume_and_are_cancelled() -> None:
    slow = SlowData()
    with started(make_executor(), limits=Limits(tokens=8)) as async_engine:
        job = async_engine.finetune(slow, "one", peft=LORA, **OPTIONS)
        job.pause()
        slow.go.set()
        until(lambda: job.state is JobState.PAUSED)
        with pytest.raises(TimeoutError):
            job.wait(0.05)
        job.resume()
        assert job.wait(60).steps == 3
        job.pause()
        job.cancel()
        slow.go.clear()
        other = async_engine.finetune(slow, "two", peft=LORA, **OPTIONS)
        other.cancel()
        slow.go.set()
        with pytest.raises(FinetuneError, match="job 'two' was cancelled"):
            asyncio.run(other.result())
        assert job.state is JobState.SUCCEEDED


class SlowData:
    """Examples that are there when somebody lets them; says who reads them."""

    def __init__(self) -> None:
        self.go, self.readers = threading.Event(), list[str]()

    def __iter__(self) -> Iterator[Any]:
        self.readers.append(threading.current_thread().name)
        assert self.go.wait(60)
        yield from DATA


def test_a_job_is_made_ready_beside_the_steps() -> None:
    executor, slow = make_executor(), SlowData()
    with started(executor) as async_engine:
        job = async_engine.finetune(slow, "one", peft=LORA, **OPTIONS)
        until(lambda: bool(slow.readers))
        assert len(async_engine.submit([1, 2], **GREEDY).wait(60).token_ids) == NEW
        with pytest.raises(PcgError, match="there is a job 'one' already"):
            async_engine.finetune(DATA, "one", peft=LORA, **OPTIONS).wait(60)
        job.pause()
        assert job.state is JobState.QUEUED
        slow.go.set()
        until(lambda: job.state is JobState.PAUSED)
        job.resume()
        assert job.wait(60).steps == 3
        slow.go.clear()
        again = async_engine.finetune(slow, "one", **OPTIONS)
        again.cancel()
        slow.go.set()
        with pytest.raises(FinetuneError, match="job 'one' was cancelled"):
            again.wait(60)
    assert slow.readers[0] == "pcg data of one"


def test_adapters_are_added_beside_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, and what serves them compiled, while steps go on; requests may name them then."""
    executor, other = make_executor(), make_executor()
    recipes = {"again": LORA, "ia3": {"peft_type": "IA3", "target_modules": ["k_proj"],
               "feedforward_modules": []}}  # fmt: skip
    for name, recipe in recipes.items():
        for tensor in other.add_adapter(name, recipe, seed=3).tensors:
            tensor.copy_(0.1 + 0.3 * torch.randn(tensor.shape))
        other.refresh_adapter(name)
        other.save_adapter(name, tmp_path / name)
    go, threads = threading.Event(), list[str]()
    program_for = executor.state.program_for

    def slow(adapter: Adapter) -> ServingProgram:
        threads.append(threading.current_thread().name)
        assert go.wait(60)
        return program_for(adapter)

    monkeypatch.setattr(executor.state, "program_for", slow)
    with started(executor) as async_engine:
        asked = [async_engine.add_adapter(name, tmp_path / name) for name in recipes]
        until(lambda: bool(threads))
        assert len(async_engine.submit([1, 2], **GREEDY).wait(60).token_ids) == NEW
        go.set()
        for one, name in zip(asked, recipes, strict=True):
            assert one.result(60).name == name
            found = async_engine.submit([1, 2, 3], name, **GREEDY).wait(60)
            expected = other.generate([[1, 2, 3]], name, **GREEDY)[0]
            assert found.token_ids == expected.token_ids
        with pytest.raises(AdapterError, match="there is an adapter 'ia3' already"):
            async_engine.add_adapter("ia3", tmp_path / "ia3").result(60)
        with pytest.raises(AdapterError, match="is not there; give the directory of a saved"):
            async_engine.add_adapter("b", tmp_path / "none").result(60)
    assert threads == ["pcg jobs_0"] * 2
    with pytest.raises(EngineError, match="the engine was closed"):
        async_engine.add_adapter("b", LORA)


def test_close_cancels_a_job_that_is_made_ready() -> None:
    slow = SlowData()
    async_engine = make_engine(make_executor(), 64).start()
    job, next_one = (
        async_engine.finetune(slow, name, peft=LORA, **OPTIONS) for name in ("one", "two")
    )
    until(lambda: bool(slow.readers))
    async_engine.close()
    for left in (job, next_one):
        with pytest.raises(FinetuneError, match=f"job '{left.name}' was cancelled"):
            left.wait(0)
    slow.go.set()


def test_nothing_runs_while_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_executor(), 64)
    steps = 0
    step = engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(engine, "step", counted)
    with engine.start() as async_engine:
        async_engine.submit([1, 2], max_new_tokens=3, ignore_eos=True).wait(60)
        job = async_engine.finetune(DATA, "one", peft=LORA, **OPTIONS)
        job.pause()
        until(lambda: job.state is JobState.PAUSED)
        before = steps
        time.sleep(0.3)
        assert steps - before <= 1


def test_close_cancels_what_is_left() -> None:
    engine = make_engine(make_executor(), 64)
    gate = StepGate(engine)
    async_engine = engine.start()
    job = async_engine.finetune(DATA, "one", peft=LORA, **LONG_JOB)
    gate.let_until(lambda: job.state is JobState.RUNNING)
    stream = async_engine.submit([1, 2, 3], **LONG)
    gate.let_until(lambda: stream.first_chunk_s is not None)
    next(stream)
    async_engine.close()
    async_engine.close()
    assert stream.wait(0).finish_reason == "cancelled"
    with pytest.raises(FinetuneError, match="job 'one' was cancelled"):
        job.wait(0)
    assert not async_engine._thread.is_alive()
    kinds = [event.kind for event in async_engine.engine.log]
    assert kinds.count(Kind.CANCELLED) == 2
    stream.cancel()
    with pytest.raises(EngineError, match="the engine was closed"):
        async_engine.submit([1])
    with pytest.raises(EngineError, match="the engine was closed"):
        async_engine.call(lambda: 1).result()


def test_an_error_of_a_step_reaches_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_executor(), 64, Limits(tokens=8))
    go, is_there = threading.Event(), threading.Event()

    def broken(*_: object) -> list[int]:
        is_there.set()
        go.wait(60)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.device, "start", broken)
    monkeypatch.setattr(engine.device, "check_alive", broken)

    slow = SlowData()

    async def main(async_engine: AsyncEngine) -> list[Any]:
        job = async_engine.finetune(slow, "one", peft=LORA, **OPTIONS)
        until(lambda: bool(slow.readers))  # it is prepared beside the steps
        streams = [async_engine.submit([1, 2, 3], **LONG) for _ in range(3)]
        waiting = asyncio.gather(
            anext(streams[0]),
            *(stream.completion() for stream in streams),
            job.result(),
            return_exceptions=True,
        )
        await asyncio.to_thread(is_there.wait, 60)  # they all wait, and the step has begun
        asked = async_engine.call(lambda: 1)
        go.set()
        found = [*await waiting, asked.exception(60) or "done"]
        slow.go.set()
        return found

    with engine.start() as async_engine:
        *found, _ = asyncio.run(main(async_engine))
        assert len(found) == 5
        for error in found:
            assert isinstance(error, EngineError)
            assert "ended by RuntimeError: the device is gone" in str(error)
        with pytest.raises(EngineError, match="the device is gone"):
            async_engine.submit([1])


class OtherStream:
    """The second stream of a device that works beside the engine's thread."""

    def begin(self) -> None:
        """Do nothing: steps run when they start."""


def test_chunks_are_delivered_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: also those of the last step, and of requests that are cancelled."""
    executor = make_executor()
    seen: list[str] = []
    put = Stream.put

    def noted(stream: Stream, chunk: Chunk, *rest: Any) -> Any:
        seen.append("put")
        return put(stream, chunk, *rest)

    monkeypatch.setattr(Stream, "put", noted)
    engine = make_engine(executor, 64)
    engine.device.side = OtherStream()  # type: ignore[assignment]
    start = engine.device.start

    def started_step(*given: Any) -> Any:
        seen.append("start")
        return when_read(start(*given), lambda: seen.append("end"), nothing)

    monkeypatch.setattr(engine.device, "start", started_step)
    with engine.start() as running:
        streams = [running.submit(prompt, **GREEDY) for prompt in prompts((5, 3))]
        found = [stream.wait().token_ids for stream in streams]
        cancelled = running.submit(prompts((4,))[0], **LONG)
        next(iter(cancelled))
        cancelled.cancel()
        assert cancelled.wait().finish_reason == "cancelled"
    assert [len(tokens) for tokens in found] == [NEW, NEW]
    text = " ".join(seen)
    assert "start put" in text.replace("put put", "put")
    assert executor.generate(prompts((5, 3)), **GREEDY)[0].token_ids == found[0]

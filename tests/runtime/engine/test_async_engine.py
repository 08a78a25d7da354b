"""The engine on a thread: everyone who waits hears of the end, whatever it is."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import (
    AdapterConflictError,
    AdapterError,
    CodegenError,
    DrainingError,
    EngineError,
    FinetuneError,
    FinetuneInterrupted,
    GenerationError,
    OutOfMemoryError,
)
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import WEIGHTS
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor, ServingProgram
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import EngineState, JobState
from pcg.runtime.requests.stream import Stream
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    NEW,
    OPTIONS,
    check_trained,
    expected,
    make_engine,
    make_executor,
    requests,
)
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


def test_streams_are_read_by_threads_and_coroutines_beside_a_job() -> None:
    """In any order, to the tokens of transformers; the job ends with the adapter as alone."""
    executor = make_executor()

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
        return found

    wanted = expected(requests(executor, LENGTHS))
    assert asyncio.run(main()) == wanted
    check_trained(executor)
    with started(executor) as async_engine:
        streams = submitted(async_engine)
        assert [[chunk.token_id for chunk in stream] for stream in streams] == wanted
        assert [list(stream.wait().token_ids) for stream in streams] == wanted


def test_the_last_of_two_engines_restores_the_switch_interval() -> None:
    before, found = sys.getswitchinterval(), []
    engines = [make_engine(make_executor()).start() for _ in range(2)]
    for engine in engines:
        engine.submit([1, 2], max_new_tokens=1).wait()
    for engine in engines:
        found.append(sys.getswitchinterval())
        engine.close()
    assert found == pytest.approx([2e-5, 2e-5])
    assert sys.getswitchinterval() == before


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


class SlowData:
    """Examples that are there when somebody lets them; says who reads them."""

    def __init__(self) -> None:
        self.go, self.readers = threading.Event(), list[str]()

    def __iter__(self) -> Iterator[Any]:
        self.readers.append(threading.current_thread().name)
        assert self.go.wait(60)
        yield from DATA


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


def test_nothing_runs_while_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_executor())
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
    engine = make_engine(make_executor())
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


# ---------------------------------------------------------- what an engine tells, and how it drains

SHORT: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


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
    engine = make_engine(make_executor())
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
    executor = make_executor()
    whole = make_executor().finetune(
        DATA, "kept", peft=LORA, progress=False, **{**OPTIONS, "max_steps": 6}
    )
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
    with make_engine(make_executor()).start() as other:
        resumed = other.finetune(DATA, "kept", peft=LORA, **options).wait(60)
    assert resumed.resumed_from == status.step
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-4)


def test_draining_gives_up_what_takes_too_long() -> None:
    engine = make_engine(make_executor())
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


# ----------------------------------------------------------------------------- adapters of one name

(TEXT,) = prompts((21,))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
    folder = tmp_path_factory.mktemp("adapters")
    made = {"base": base, "folder": folder}
    for seed, name in enumerate(("one", "two")):
        made[name] = oracle.with_adapter(base, ("q_proj", "up_proj")[seed:], rank=4, seed=seed)
        oracle.save(made[name], folder / name)
    return made


def theirs(models: dict[str, Any], name: str) -> tuple[int, ...]:
    return tuple(oracle.greedy(models[name], TEXT, SHORT["max_new_tokens"]))


@contextmanager
def reloading(models: dict[str, Any]) -> Iterator[tuple[Executor, AsyncEngine]]:
    executor = compiled.executor(models["base"])
    with make_engine(executor).start() as running:
        yield executor, running
    running.engine.check_integrity()


class Held:
    """Lets loads of one path wait in the midst until they may go on."""

    def __init__(self, executor: Executor, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        make = executor.state.make_adapter

        def held(name: str, given: object = "lora", *, seed: int = 0) -> Any:
            if given == path:
                self.began.set()
                assert self.go.wait(60)
            return make(name, given, seed=seed)

        monkeypatch.setattr(executor.state, "make_adapter", held)


def test_what_is_asked_of_one_name_is_done_in_that_order(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first is slow; other names do not wait for it."""
    one, two = (models["folder"] / name for name in ("one", "two"))
    with reloading(models) as (executor, running):
        held = Held(executor, one, monkeypatch)
        first = running.add_adapter("a", one)
        assert held.began.wait(60)
        second = running.add_adapter("a", two, replace=True)
        third = running.add_adapter("a", two)
        removed = running.remove_adapter("a")
        again = running.add_adapter("a", two)
        other = running.add_adapter("b", two)
        other.result(60)
        assert not any(each.done() for each in (first, second, third, removed, again))
        held.go.set()
        numbers = [executor.state.versions.of(each.result(60)) for each in (first, second, again)]
        assert list(map(str, numbers)) == ["a@1", "a@2", "a@3"]
        with pytest.raises(AdapterConflictError, match="there is an adapter 'a' already"):
            third.result(60)
        assert removed.result(60) is None
        assert running.submit(TEXT, "a", **SHORT).wait(60).token_ids == theirs(models, "two")
        assert not running._loads._last


def test_a_load_that_fails_half_way_leaves_the_old_one(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = (models["folder"] / name for name in ("one", "two"))
    shutil.copytree(one, tmp_path / "cut")
    whole = (one / WEIGHTS).read_bytes()
    (tmp_path / "cut" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with reloading(models) as (executor, running):
        running.add_adapter("a", one).result(60)
        (before,) = running.adapters()
        with pytest.raises(AdapterError):
            running.add_adapter("a", tmp_path / "cut", replace=True).result(60)

        def failing(*_: object) -> None:
            raise CodegenError("no")

        for name in ("program_for", "put_adapter"):
            with monkeypatch.context() as patched:
                patched.setattr(executor.state, name, failing)
                with pytest.raises(CodegenError):
                    running.add_adapter("a", two, replace=True).result(60)
        with pytest.raises(AdapterConflictError, match="there is a@1"):
            running.add_adapter("a", two, expected_version=7).result(60)
        assert running.adapters() == [before]
        assert running.submit(TEXT, "a", **SHORT).wait(60).token_ids == theirs(models, "one")


def test_a_name_that_a_job_trains_is_left_to_it(models: dict[str, Any]) -> None:
    """From when the job is asked for; what it publishes are versions of the name."""
    go, asked = threading.Event(), threading.Event()

    def data() -> Iterator[Any]:
        asked.set()
        assert go.wait(60)
        yield from DATA

    with reloading(models) as (_, running):
        job = running.finetune(data(), "a", peft=LORA, publish_every=1, **OPTIONS)
        assert asked.wait(60)
        for attempt in (
            running.add_adapter("a", models["folder"] / "one", replace=True),
            running.remove_adapter("a"),
        ):
            with pytest.raises(AdapterConflictError, match="a job that trains adapter 'a'"):
                attempt.result(60)
        go.set()
        until(lambda: job.state is not JobState.QUEUED)
        job.wait(60)
        published = [e.details for e in running.engine.log if e.kind is Kind.PUBLISHED]
        assert [one["adapter_version"] for one in published] == [1, 2, 3, 4]
        running.add_adapter("a", models["folder"] / "one", expected_version=4).result(60)
        (status,) = running.adapters()
        assert str(status.version) == "a@5"
        assert running.submit(TEXT, "a", **SHORT).wait(60).token_ids == theirs(models, "one")


def test_many_threads_replace_one_name_at_once(models: dict[str, Any]) -> None:
    """Each answer is of one version, whole; of those who expect a version, one each wins."""
    paths = {i: models["folder"] / ("one", "two")[i % 2] for i in range(8)}
    with reloading(models) as (executor, running):
        first = running.add_adapter("a", paths[0]).result(60)
        assert first.name == "a"
        ends = [running.add_adapter("a", path, expected_version=1) for path in paths.values()]
        streams = []
        while not all(end.done() for end in ends):
            streams.append(running.submit(TEXT, "a", **SHORT))
            streams[-1].wait(60)
        won = [end for end in ends if end.exception() is None]
        assert len(won) == 1
        assert executor.adapters["a"] is won[0].result()
        for stream in streams:
            done = stream.wait(60)
            assert done.adapter_version is not None
            name = (
                "one"
                if done.adapter_version.number == 1
                else ("one", "two")[ends.index(won[0]) % 2]
            )
            assert done.token_ids == theirs(models, name)

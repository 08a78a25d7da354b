"""Adapters of one name that are loaded, removed and trained at once on a running engine."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.errors import AdapterConflictError, AdapterError, AdapterNotFoundError, CodegenError
from pcg.peft.adapter_files import WEIGHTS
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine
from tests.support.step_gate import StepGate
from tests.support.waiting import until

(TEXT,) = prompts((21,))
NEW: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


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
    return tuple(oracle.greedy(models[name], TEXT, NEW["max_new_tokens"]))


@contextmanager
def started(models: dict[str, Any]) -> Iterator[tuple[Executor, AsyncEngine]]:
    executor = compiler.compile(models["base"])
    with make_engine(executor, 64).start() as running:
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


def test_requests_in_flight_finish_on_theirs(models: dict[str, Any]) -> None:
    with started(models) as (_, running):
        gate = StepGate(running.engine)
        running.add_adapter("a", models["folder"] / "one").result(60)
        old = running.submit(TEXT, "a", **NEW)
        gate.let()
        first = next(old)
        assert str(first.adapter_version) == "a@1"
        running.add_adapter("a", models["folder"] / "two", replace=True).result(60)
        new = running.submit(TEXT, "a", **NEW)
        assert not old.is_over
        (status,) = running.adapters()
        assert str(status.version) == "a@2"
        gate.open()
        found = [stream.wait(60) for stream in (old, new)]
        assert [one.token_ids for one in found] == [theirs(models, "one"), theirs(models, "two")]
        versions = [one.adapter_version for one in found]
        assert [one.number for one in versions if one is not None] == [1, 2]
        digests = [one.digest for one in versions if one is not None]
        assert None not in digests
        assert digests[0] != digests[1] == status.version.digest
        assert running.numbers().adapters == 1
        submitted = [e.details for e in running.engine.log if e.kind is Kind.SUBMITTED]
        assert [one["adapter_version"] for one in submitted] == [1, 2]


def test_what_is_asked_of_one_name_is_done_in_that_order(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first is slow; other names do not wait for it."""
    one, two = (models["folder"] / name for name in ("one", "two"))
    with started(models) as (executor, running):
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
        assert running.submit(TEXT, "a", **NEW).wait(60).token_ids == theirs(models, "two")
        assert not running._loads._last


def test_removed_while_it_is_loaded(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = models["folder"] / "one"
    with started(models) as (executor, running):
        held = Held(executor, one, monkeypatch)
        loaded = running.add_adapter("a", one)
        assert held.began.wait(60)
        removed = running.remove_adapter("a")
        held.go.set()
        loaded.result(60)
        removed.result(60)
        with pytest.raises(AdapterNotFoundError, match="there is no adapter 'a'"):
            running.submit(TEXT, "a", **NEW)
        assert running.adapters() == []


def test_a_load_that_fails_half_way_leaves_the_old_one(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = (models["folder"] / name for name in ("one", "two"))
    shutil.copytree(one, tmp_path / "cut")
    whole = (one / WEIGHTS).read_bytes()
    (tmp_path / "cut" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with started(models) as (executor, running):
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
        assert running.submit(TEXT, "a", **NEW).wait(60).token_ids == theirs(models, "one")


def test_a_name_that_a_job_trains_is_left_to_it(models: dict[str, Any]) -> None:
    """From when the job is asked for; what it publishes are versions of the name."""
    go, asked = threading.Event(), threading.Event()

    def data() -> Iterator[Any]:
        asked.set()
        assert go.wait(60)
        yield from DATA

    with started(models) as (_, running):
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
        assert running.submit(TEXT, "a", **NEW).wait(60).token_ids == theirs(models, "one")


def test_many_threads_replace_one_name_at_once(models: dict[str, Any]) -> None:
    """Each answer is of one version, whole; of those who expect a version, one each wins."""
    paths = {i: models["folder"] / ("one", "two")[i % 2] for i in range(8)}
    with started(models) as (executor, running):
        first = running.add_adapter("a", paths[0]).result(60)
        assert first.name == "a"
        ends = [running.add_adapter("a", path, expected_version=1) for path in paths.values()]
        streams = []
        while not all(end.done() for end in ends):
            streams.append(running.submit(TEXT, "a", **NEW))
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

"""Random requests with bad fields, beside those of other tenants, whose tokens stay the same.

Whatever is asked, only a PcgError comes back, no page or sequence is lost, and the thread goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.errors import EngineError, GenerationError, PcgError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.stream import Stream
from tests.support.hostile_requests import Hostile
from tests.support.small_engine import LORA
from tests.support.text_model import VOCABULARY, save_text_model

FEW, MANY = 400, 10_000
KEPT = 2_000
TENANTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    directory: Path = save_text_model(tmp_path_factory.mktemp("model"))
    found = compiler.compile(str(directory), dtype="float32")
    for seed, name in enumerate(TENANTS):
        adapter = found.add_adapter(name, LORA, seed=seed)
        for tensor in adapter.tensors:
            tensor.add_(0.05)
        found.refresh_adapter(name)
    return found


def make_engine(executor: Executor) -> Engine:
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    queue = QueueLimits(requests=1_000, tenant_requests=30)
    return executor.engine(kv_cache_bytes=48 * page_bytes, log=EventLog(KEPT), queue=queue)


def good(executor: Executor, count: int) -> list[Request]:
    """Return requests of three tenants, greedy and sampled, on the base and on adapters."""
    drawn = random.Random(0)
    asked = []
    for number in range(count):
        prompt = [drawn.randrange(3, VOCABULARY) for _ in range(drawn.choice([1, 9, 33, 60]))]
        fields: dict[str, Any] = {"tenant": TENANTS[number % 3], "ignore_eos": True}
        fields["max_new_tokens"] = drawn.randint(2, 12)
        if number % 2:
            fields |= {"temperature": 1.0, "seed": number, "top_p": 0.9}
        asked.append(executor.request(prompt, drawn.choice([None, *TENANTS]), **fields))
    return asked


def alone(executor: Executor, asked: list[Request]) -> list[tuple[int, ...]]:
    """Return what each of some requests generates, without hostile ones."""
    found: dict[int, tuple[int, ...]] = {}
    for start in range(0, len(asked), 8):
        engine = make_engine(executor)
        for request in asked[start : start + 8]:
            engine.submit(request)
        while not engine.is_idle:
            for chunk in engine.step():
                if chunk.completion is not None:
                    found[start + chunk.index] = chunk.completion.token_ids
    return [found[number] for number in range(len(asked))]


def check_empty(engine: Engine) -> None:
    """Nothing is left of what ran but what may be found again."""
    engine.check_integrity()
    scheduler = engine.scheduler
    assert engine.is_idle
    assert not scheduler.backlog.requests
    assert engine.pool.free + scheduler.adapters.idle_pages == engine.pool.size
    assert len(engine.log) <= KEPT


@pytest.fixture(scope="module")
def both(executor: Executor) -> tuple[list[Request], list[tuple[int, ...]]]:
    asked = good(executor, 24)
    return asked, alone(executor, asked)


SIZES = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", SIZES)
def test_steps(
    executor: Executor, both: tuple[list[Request], list[tuple[int, ...]]], count: int
) -> None:
    hostile, engine = Hostile(executor, seed=count), make_engine(executor)
    asked, expected = both
    turns = iter(_turns(len(asked), count))
    running: dict[int, int] = {}
    refused = ended = finished = 0
    for number in range(count):
        if (mine := next(turns)) is not None:
            running[engine.submitted] = mine
            engine.submit(asked[mine])
        try:
            name = engine.submit(hostile.request())
            if hostile.random.random() < 0.1:
                engine.cancel(name)
        except PcgError:
            refused += 1
        while True:
            for chunk in engine.step():
                if chunk.index in running and chunk.completion is not None:
                    assert chunk.error is None
                    assert chunk.completion.token_ids == expected[running.pop(chunk.index)]
                    finished += 1
                ended += chunk.completion is not None
            if number + 1 < count or engine.is_idle:
                break
        if not number % 10:
            engine.check_integrity()
    assert not running
    assert finished >= len(asked)
    assert refused > count // 3
    assert ended - finished > count // 10
    check_empty(engine)


@pytest.mark.parametrize("count", SIZES)
def test_the_thread(
    executor: Executor, both: tuple[list[Request], list[tuple[int, ...]]], count: int
) -> None:
    hostile, engine = Hostile(executor, seed=count + 1), make_engine(executor)
    asked, expected = both
    mine: list[tuple[Stream, int]] = []
    theirs: list[Stream] = []
    with engine.start() as running:
        for turn in _turns(len(asked), count):
            if turn is not None:
                mine.append((running.submit_request(asked[turn]), turn))
            try:
                stream = running.submit_request(hostile.request())
            except EngineError:
                raise
            except PcgError:
                continue
            theirs.append(stream)
            if hostile.random.random() < 0.1:
                stream.cancel()
            if hostile.random.random() < 0.3:  # so that much, but not all, is queued
                running.run(lambda: None)
        for stream, number in mine:
            assert stream.wait(120).token_ids == expected[number]
        failed = 0
        for stream in theirs:
            try:
                stream.wait(120)
            except EngineError:
                raise
            except PcgError:
                failed += 1
        assert 0 < failed < len(theirs)
        assert running.submit_request(asked[0]).wait(60).token_ids == expected[0]
    check_empty(engine)


def _turns(asked: int, count: int) -> Iterator[int | None]:
    """Return which of the good requests comes with each hostile one: each many times, or none."""
    every = 8
    for number in range(count):
        yield number // every % asked if number % every == 0 else None


def test_what_ends_a_timeout_is_not_its_name(executor: Executor) -> None:
    """A name is free again when its request ended; the next one has a time of its own."""
    engine = make_engine(executor)
    fields: dict[str, Any] = {"request_id": "mine", "ignore_eos": True}
    engine.submit(executor.request([1, 2], max_new_tokens=1, timeout_s=0.05, **fields))
    while not engine.is_idle:
        engine.step()
    engine.submit(executor.request([1, 2], max_new_tokens=100, **fields))
    now_s = engine.clock.now_s() + 1.0
    engine.clock.now_s = lambda first_ns=None: now_s  # type: ignore[method-assign]
    ends = []
    while not engine.is_idle:
        ends += [chunk.completion for chunk in engine.step() if chunk.completion is not None]
    assert [one.finish_reason for one in ends] == ["length"]


def test_a_name_is_taken_until_all_continuations_end(executor: Executor) -> None:
    """Else who cancels the first request would cancel the second one of that name."""
    engine = make_engine(executor)
    fields: dict[str, Any] = {"request_id": "mine", "ignore_eos": True, "temperature": 1.0}
    engine.submit(executor.request([1], n=2, seed=0, max_new_tokens=40, **fields))
    engine.step()
    first = engine.requests.by_id["mine"]
    first.limit = 3  # it ends before the other
    while not first.is_over:
        engine.step()
    with pytest.raises(GenerationError, match="there is a request 'mine' already"):
        engine.submit(executor.request([1], max_new_tokens=2, **fields))
    while not engine.is_idle:
        engine.step()
    engine.submit(executor.request([1], max_new_tokens=2, **fields))

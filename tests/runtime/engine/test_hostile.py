"""Random requests with bad fields, beside those of other tenants, whose tokens stay the same.

Whatever is asked, only a PcgError comes back, no page or sequence is lost, and the thread goes on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import EngineError, GenerationError, PcgError, QueueFullError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import EventLog, Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.stream import Stream
from tests.support import compiled
from tests.support.families import BY_NAME, FAMILIES
from tests.support.hostile_requests import Hostile
from tests.support.request_programs import RequestProgram, Served
from tests.support.small_engine import LORA, NEW, make_executor
from tests.support.text_model import VOCABULARY, save_text_model
from tests.support.waiting import until

FEW, MANY = 400, 10_000
KEPT = 2_000
TENANTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    directory: Path = save_text_model(tmp_path_factory.mktemp("model"))
    found = compiled.executor(str(directory), dtype="float32")
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


# ------------------------------------------------------------------------- one tenant sends a flood

NEIGHBOUR: dict[str, Any] = {"tenant": "neighbour", "max_new_tokens": NEW, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def small_executor() -> Executor:
    return make_executor()


def hold(running: AsyncEngine) -> threading.Event:
    """Keep the engine's thread between two steps until the event is set."""
    release, held = threading.Event(), threading.Event()
    running.call(lambda: (held.set(), release.wait(60)))
    assert held.wait(60)
    return release


def test_calls_let_the_steps_go_on(small_executor: Executor) -> None:
    """A second of calls that come at once does not stand between two tokens of a neighbour."""
    done, done_before = [], []
    with small_executor.engine(kv_cache_bytes=2**20).start() as running:
        running.engine.log.listen(
            lambda event: done_before.append(len(done)) if event.kind is Kind.FINISHED else None
        )
        release = hold(running)
        stream = running.submit(PROMPT, **NEIGHBOUR)
        for _ in range(500):
            running.call(lambda: (time.sleep(2e-3), done.append(True)))
        release.set()
        stream.wait(60)
        assert done_before[0] < 400
    assert len(done) == 500


def test_a_flood_is_refused_where_it_is_made(small_executor: Executor) -> None:
    """It costs the engine's thread nothing, and the neighbour's requests are taken."""
    queue = QueueLimits(tenant_requests=8)
    with small_executor.engine(kv_cache_bytes=2**20, queue=queue).start() as running:
        expected = running.submit(PROMPT, **NEIGHBOUR).wait(60).token_ids
        release = hold(running)
        flood = [running.submit([1], tenant="hostile", max_new_tokens=1) for _ in range(2000)]
        stream = running.submit(PROMPT, **NEIGHBOUR)
        assert sum(one.is_over for one in flood) == 2000 - 8
        assert running._calls.qsize() < 20
        release.set()
        assert stream.wait(60).token_ids == expected
        with pytest.raises(QueueFullError, match="8 requests wait or came since the last step"):
            flood[-1].wait(60)
        assert all(one.wait(60).token_ids for one in flood[:8])
        assert running.numbers().totals.turned_away == 2000 - 8
        assert not len(running._streams.arrivals)


def test_a_flood_stands_before_nobody_elses_request(small_executor: Executor) -> None:
    """As it comes, eight of it are begun before the neighbour's request, and not five hundred."""
    with small_executor.engine(kv_cache_bytes=2**20).start() as running:
        begun = []
        running.engine.log.listen(
            lambda event: begun.append(event.subject) if event.kind is Kind.SUBMITTED else None
        )
        release = hold(running)
        hostile: dict[str, Any] = {"tenant": "hostile", "max_new_tokens": 1}
        flood = [running.submit([1], request_id=f"h{turn}", **hostile) for turn in range(500)]
        stream = running.submit(PROMPT, request_id="modest", **NEIGHBOUR)
        release.set()
        stream.wait(60)
        assert all(one.wait(60).token_ids for one in flood)
    assert begun.index("modest") == 8
    assert begun == [*begun[:8], "modest", *(f"h{turn}" for turn in range(8, 500))]


def test_what_is_held_back_is_cancelled_drained_and_refused_like_the_others(
    small_executor: Executor,
) -> None:
    hostile: dict[str, Any] = {"tenant": "hostile", "max_new_tokens": 2, "ignore_eos": True}
    with small_executor.engine(kv_cache_bytes=2**20).start() as running:
        release = hold(running)
        flood = [running.submit([1], request_id=f"h{turn}", **hostile) for turn in range(40)]
        there = running._calls.qsize()
        flood[39].cancel()
        assert running._calls.qsize() == there  # it ends in its turn, before nobody else's
        running.cancel("h38")
        drained = running.drain()
        release.set()
        reasons = [stream.wait(60).finish_reason for stream in flood]
        assert reasons == ["length"] * 38 + ["cancelled"] * 2
        drained.result(60)
    running = small_executor.engine(kv_cache_bytes=2**20).start()
    release = hold(running)
    flood = [running.submit([1], **hostile) for _ in range(1000)]
    closing = threading.Thread(target=running.close)
    closing.start()
    until(lambda: running._calls.qsize() == 9)  # eight of the flood, and the end
    release.set()
    closing.join()
    assert all(stream.is_over for stream in flood)
    with pytest.raises(EngineError, match="closed"):
        flood[-1].wait(60)


def test_a_prompt_that_is_too_long_is_refused_unread(small_executor: Executor) -> None:
    """Tokens of a prompt that the model has no positions for are not looked at one by one."""

    class Untouched(tuple[int, ...]):
        def __iter__(self) -> Any:
            raise AssertionError("it was read")

    with small_executor.engine(kv_cache_bytes=2**20).start() as running:
        request = small_executor.request([1, 2], tenant="hostile")
        object.__setattr__(request, "prompt_ids", Untouched([1] * 100_000))
        request.__dict__.pop("length", None)
        with pytest.raises(GenerationError, match="positions"):
            running.submit_request(request).wait(60)


# ---------------------------------------------------------------------------------- random programs

FEW_FAMILIES = ("gemma2",)
"""Families of the default run; the others, and more programs, run in the slow one."""
CASES = [
    pytest.param(family.name, marks=() if family.name in FEW_FAMILIES else pytest.mark.slow)
    for family in FAMILIES
]


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_each_family(name: str, tmp_path: Path) -> None:
    """In steps one by one, and in steps that begin before the one before is read."""
    served = Served.of(BY_NAME[name], tmp_path)
    checked, ahead = 0, 0
    for seed in range(4):
        program = RequestProgram(served, seed, is_ahead=seed % 2 == 1)
        program.run()
        checked += len(program.checked)
        ahead += program.engine.reads["ahead"]
    assert checked >= 40
    assert ahead > 10

"""Everything that a tenant may send at once, beside a neighbour whose tokens and steps go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pcg.errors import EngineError, GenerationError, QueueFullError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.engine import async_engine
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from tests.support.small_engine import NEW, make_executor
from tests.support.waiting import until

NEIGHBOUR: dict[str, Any] = {"tenant": "neighbour", "max_new_tokens": NEW, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def executor() -> Executor:
    return make_executor()


def hold(running: AsyncEngine) -> threading.Event:
    """Keep the engine's thread between two steps until the event is set."""
    release, held = threading.Event(), threading.Event()
    running.call(lambda: (held.set(), release.wait(60)))
    assert held.wait(60)
    return release


def test_calls_let_the_steps_go_on(executor: Executor) -> None:
    """A second of calls that come at once does not stand between two tokens of a neighbour."""
    done, done_before = [], []
    with executor.engine(kv_cache_bytes=2**20).start() as running:
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


def test_a_flood_is_refused_where_it_is_made(executor: Executor) -> None:
    """It costs the engine's thread nothing, and the neighbour's requests are taken."""
    queue = QueueLimits(tenant_requests=8)
    with executor.engine(kv_cache_bytes=2**20, queue=queue).start() as running:
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


def test_a_flood_stands_before_nobody_elses_request(executor: Executor) -> None:
    """As it comes, eight of it are begun before the neighbour's request, and not five hundred."""
    with executor.engine(kv_cache_bytes=2**20).start() as running:
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
    executor: Executor,
) -> None:
    hostile: dict[str, Any] = {"tenant": "hostile", "max_new_tokens": 2, "ignore_eos": True}
    with executor.engine(kv_cache_bytes=2**20).start() as running:
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
    running = executor.engine(kv_cache_bytes=2**20).start()
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


def test_calls_of_a_flood_take_a_small_part_of_a_step_where_others_are_served(
    executor: Executor,
) -> None:
    with executor.engine(kv_cache_bytes=2**20).start() as running:

        def told() -> tuple[bool, float]:
            running._latest_step_s = 0.01
            return running.engine.scheduler.policy.is_shared, running._calls_s

        assert running.run(told) == (False, 1e-3)
        release = hold(running)
        streams = [running.submit(PROMPT, **NEIGHBOUR), running.submit(PROMPT, tenant="other")]
        asked = running.call(told)
        release.set()
        assert asked.result(60) == (True, pytest.approx(3e-4))
        for stream in streams:
            stream.wait(60)


def test_what_is_refused_is_not_looked_at(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a full queue take no time of the interpreter that steps need."""
    queue = QueueLimits(tenant_requests=2)
    with executor.engine(kv_cache_bytes=2**20, queue=queue).start() as running:
        release = hold(running)
        made = []
        make = async_engine.make_request
        monkeypatch.setattr(
            async_engine, "make_request", lambda *given: (made.append(given), make(*given))[1]
        )
        for _ in range(50):
            running.submit([1], tenant="hostile", max_new_tokens=1)
        assert len(made) == 2
        release.set()


def test_a_prompt_that_is_too_long_is_refused_unread(executor: Executor) -> None:
    """Tokens of a prompt that the model has no positions for are not looked at one by one."""

    class Untouched(tuple[int, ...]):
        def __iter__(self) -> Any:
            raise AssertionError("it was read")

    with executor.engine(kv_cache_bytes=2**20).start() as running:
        request = executor.request([1, 2], tenant="hostile")
        object.__setattr__(request, "prompt_ids", Untouched([1] * 100_000))
        request.__dict__.pop("length", None)
        with pytest.raises(GenerationError, match="positions"):
            running.submit_request(request).wait(60)

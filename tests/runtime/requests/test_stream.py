"""Streams that are left, and how their readers are woken."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from pcg.errors import GenerationError
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.requests.request import Chunk, Completion
from pcg.runtime.requests.stream import Stream, Wakes
from tests.support.small_engine import make_engine, make_executor
from tests.support.step_gate import StepGate
from tests.support.waiting import until

LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}


@dataclass(frozen=True)
class Gated:
    """An engine that takes ten steps, and further ones once its gate is open."""

    running: AsyncEngine
    gate: StepGate

    def submit(self, **fields: Any) -> Stream:
        return self.running.submit([1, 2], **LONG, **fields)


@pytest.fixture
def engine() -> Iterator[Gated]:
    made = make_engine(make_executor(), 64)
    gate = StepGate(made)
    gate.let(10)
    with made.start() as running:
        yield Gated(running, gate)
    made.check_integrity()


def end(engine: Gated, stream: Stream) -> tuple[str, bool]:
    """How it ended, and if that was before its last token."""
    engine.gate.open()
    completion = stream.wait(60)
    return completion.finish_reason, len(completion.token_ids) < 100


def broken_off(engine: Gated) -> Stream:
    stream = engine.submit()

    async def read() -> None:
        async for _ in stream:
            break

    asyncio.run(read())
    return stream


def broken_off_in_a_thread(engine: Gated) -> Stream:
    stream = engine.submit()
    for _ in stream:
        break
    return stream


def raised_within(engine: Gated) -> Stream:
    stream = engine.submit()

    async def read() -> None:
        async for _ in stream:
            raise ConnectionError("the client is gone")

    with pytest.raises(ConnectionError):
        asyncio.run(read())
    return stream


def task_cancelled(engine: Gated) -> Stream:
    """While it waits for a chunk; what holds the task and its error does not matter."""
    stream = engine.submit()

    async def read() -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        task = asyncio.create_task(read())
        await anext(stream)
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        engine.gate.open()
        await asyncio.to_thread(stream.wait, 60)  # and not once the task is collected

    asyncio.run(main())
    return stream


def timed_out(engine: Gated) -> Stream:
    stream = engine.submit()

    async def read() -> None:
        async with asyncio.timeout(0.1):
            async for _ in stream:
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(read())
    return stream


def generator_closed(engine: Gated) -> Stream:
    """As a web framework closes the body of a response when its client leaves."""
    stream = engine.submit()

    async def body() -> AsyncIterator[str]:
        async for chunk in stream:
            yield chunk.text

    async def main() -> None:
        made = body()
        await anext(made)
        await made.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    return stream


def context_left(engine: Gated) -> Stream:
    async def main() -> Stream:
        async with engine.submit() as stream:
            await anext(stream)
        return stream

    return asyncio.run(main())


@pytest.mark.parametrize(
    "leave",
    [
        broken_off,
        broken_off_in_a_thread,
        raised_within,
        task_cancelled,
        timed_out,
        generator_closed,
        context_left,
    ],
)
def test_a_stream_that_is_left_ends_its_request(
    engine: Gated, leave: Callable[[Gated], Stream]
) -> None:
    assert end(engine, leave(engine)) == ("cancelled", True)


def test_generate_that_is_left_ends_all_its_requests() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    gate = StepGate(engine)
    gate.let(10)
    with engine.start() as running:
        chunks = executor.generate([[1, 2]] * 3, stream=True, **LONG)
        next(chunks)
        assert running.numbers().running + running.numbers().waiting > 0
        chunks.close()  # type: ignore[attr-defined]
        gate.open()
        until(lambda: not running.numbers().running + running.numbers().waiting)
        assert running.engine.totals.requests["cancelled"] == 3


def test_what_does_not_leave_ends_nothing(engine: Gated) -> None:
    """Single chunks, a wait that is given up, and a stream that nobody reads."""
    stream = engine.submit()

    async def main() -> None:
        assert (await anext(stream)).token_id is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.completion(), 1e-3)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(main())
    next(stream)
    engine.running.submit([3], request_id="nobody reads", **LONG)
    gc.collect()
    assert end(engine, stream) == ("length", False)
    read = list(stream)
    assert read[-1].completion == stream.wait(0)
    assert list(stream) == []


class CountedLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    wakes = 0

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:
        self.wakes += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_a_step_wakes_each_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_engine(make_executor(), 64)
    steps, step = [0], made.step

    def counted() -> list[Chunk]:
        chunks = step()
        steps[0] += bool(chunks)
        return chunks

    monkeypatch.setattr(made, "step", counted)

    async def read(stream: Stream) -> int:
        return sum([chunk.token_id is not None async for chunk in stream])

    async def read_all(streams: list[Stream]) -> list[int]:
        return await asyncio.gather(*map(read, streams), *(waited(one) for one in streams))

    async def waited(stream: Stream) -> int:
        return len((await stream.completion()).token_ids)

    def run(streams: list[Stream], loops: list[CountedLoop], found: list[int]) -> None:
        loop = CountedLoop()
        loops.append(loop)
        try:
            found += loop.run_until_complete(read_all(streams))
        finally:
            loop.close()

    with made.start() as running:
        fields: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
        go = threading.Event()
        held = running.call(go.wait)
        streams = [running.submit([1, 2, i], **fields) for i in range(1, 9)]
        loops: list[CountedLoop] = []
        found: list[int] = []
        threads = [
            threading.Thread(target=run, args=(half, loops, found))
            for half in (streams[::2], streams[1::2])
        ]
        for thread in threads:
            thread.start()
        go.set()
        held.result(60)
        for thread in threads:
            thread.join(60)
    assert found == [20] * 16
    assert steps[0] >= 20
    for loop in loops:
        assert loop.wakes <= steps[0]


def test_readers_of_a_closed_loop_harm_nobody() -> None:
    cancelled: list[Stream] = []
    stream, wakes = Stream(cancelled.append), Wakes()

    async def wait() -> None:
        reading = stream.next_chunk()
        reading.send(None)  # to where it waits
        reading.close()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait())
    loop.close()
    gc.collect()
    stream.put(Chunk(0, "a", 1), wakes)
    wakes.send()
    assert next(stream).text == "a"
    done = Completion("a", (1,), "stop", None, 1)
    stream.put(Chunk(0, "", None, completion=done), wakes)
    assert stream.wait(0) is done
    stream.fail(GenerationError("too late"))
    assert stream.wait(0) is done


def test_an_engine_of_many_names(engine: Gated) -> None:
    """A request's id is on its stream, and cancels it."""
    given = engine.submit(request_id="cmpl-1")
    made = engine.submit()
    engine.gate.let_until(lambda: made.first_chunk_s is not None)
    assert given.request_id == "cmpl-1"
    assert next(given).request_id == "cmpl-1"
    assert next(made).request_id == made.request_id == "request 1"
    engine.running.cancel("cmpl-1")
    engine.running.cancel("nobody")
    engine.gate.let(2)
    assert given.wait(60).finish_reason == "cancelled"
    assert not made.is_over
    twice = engine.submit(request_id="again")
    with pytest.raises(GenerationError, match="there is a request 'again' already"):
        engine.submit(request_id="again").wait(60)
    twice.cancel()
    assert end(engine, twice) == ("cancelled", True)

"""Streams that are left, and how their readers are woken."""

from __future__ import annotations

import asyncio
import gc
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
    made = make_engine(make_executor())
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
        broken_off_in_a_thread,
        task_cancelled,
        context_left,
        pytest.param(broken_off, marks=pytest.mark.slow),
        pytest.param(raised_within, marks=pytest.mark.slow),
        pytest.param(timed_out, marks=pytest.mark.slow),
        pytest.param(generator_closed, marks=pytest.mark.slow),
    ],
)
def test_a_stream_that_is_left_ends_its_request(
    engine: Gated, leave: Callable[[Gated], Stream]
) -> None:
    assert end(engine, leave(engine)) == ("cancelled", True)


def test_generate_that_is_left_ends_all_its_requests() -> None:
    executor = make_executor()
    engine = make_engine(executor)
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

"""Streams: a request's output from the engine's thread, for threads and for coroutines.

    async for chunk in stream: …        cancels the request if the loop ends early
    await anext(stream)                 takes one chunk, and does not cancel the request

Coroutines that wait for chunks of the same step are woken by a single call of their event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from threading import Condition, Lock
from typing import Self, TypeAlias

from pcg.runtime.requests.request import Chunk, Completion, Request

Waiter: TypeAlias = asyncio.Future[None]


class Wakes:
    """The coroutines to wake after a step, by their event loops, and functions to call."""

    def __init__(self) -> None:
        self._waiters: list[tuple[asyncio.AbstractEventLoop, Waiter]] = []
        self._calls: set[Callable[[], None]] = set()

    def add(self, waiters: Iterable[tuple[asyncio.AbstractEventLoop, Waiter]]) -> None:
        self._waiters += waiters

    def call(self, act: Callable[[], None]) -> None:
        """Add a function to call once after the step."""
        self._calls.add(act)

    def send(self) -> None:
        """Wake the waiters, by a single call for each event loop."""
        while self._calls:
            self._calls.pop()()
        if not self._waiters:
            return
        of_loop: defaultdict[asyncio.AbstractEventLoop, list[Waiter]] = defaultdict(list)
        for loop, waiter in self._waiters:
            of_loop[loop].append(waiter)
        self._waiters.clear()
        for loop, waiters in of_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_set_all, waiters)


def _set_all(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class Stream:
    """The chunks of a request, for a single reader.

    The last chunk carries the completion, also for a cancelled or timed-out request. An error, such
    as a refusal, is raised in place of the next chunk. An iteration (`for`, `async for`, `with`,
    `async with`) that ends early, or in a cancelled task, cancels the request.

    Attributes:
        request_id: the request's id; None until the engine has generated it.
        has_begun: True once the engine has the request.
        is_cancelled: True after cancellation, also before the engine has the request.
        is_over: True after the last chunk or an error, read or not.
        began_s, first_chunk_s, ended_s: times of creation, first chunk and end, seconds of the
            monotonic clock; None before.
    """

    def __init__(self, cancel: Callable[[Stream], None], request_id: str | None = None) -> None:
        self.request_id = request_id
        self.has_begun = self.is_cancelled = self.is_over = False
        self.began_s = time.monotonic()
        self.first_chunk_s: float | None = None
        self.ended_s: float | None = None
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._completions: dict[int, Completion] = {}
        self._error: BaseException | None = None
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._sleeping_threads = 0
        self._readers: list[tuple[asyncio.AbstractEventLoop, Waiter]] = []
        self._await_end: list[tuple[asyncio.AbstractEventLoop, Waiter]] = []

    def cancel(self) -> None:
        """Cancel the request before the next step; the last chunk has the reason `cancelled`."""
        if not self.is_over:
            self._cancel(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # ------------------------------------------------------------------------------- reading

    def __iter__(self) -> _Iteration:
        return _Iteration(self)

    def __aiter__(self) -> _Iteration:
        return _Iteration(self)

    def __next__(self) -> Chunk:
        with self._lock:
            self._sleep_until(lambda: bool(self._chunks) or self.is_over, None)
            return self._take(StopIteration)

    async def __anext__(self) -> Chunk:
        return await self.next_chunk()

    async def next_chunk(self, *, cancels: bool = False) -> Chunk:
        """Wait for the next chunk; with `cancels`, cancelling the task cancels the request."""
        while True:
            with self._lock:
                if self._chunks or self.is_over:
                    return self._take(StopAsyncIteration)
                waiter = _register(self._readers)
            try:
                await waiter
            except asyncio.CancelledError:
                if cancels:
                    self.cancel()
                raise

    async def next_chunks(self) -> list[Chunk]:
        """Wait for chunks and return all available chunks; an empty list after the last chunk.

        Cancelling the task does not cancel the request. Raises the error that ended the request.
        """
        while True:
            with self._lock:
                if self._chunks:
                    chunks = list(self._chunks)
                    self._chunks.clear()
                    return chunks
                if self._error is not None:
                    raise self._error
                if self.is_over:
                    return []
                waiter = _register(self._readers)
            await waiter

    def _take(self, end: type[Exception]) -> Chunk:
        if self._chunks:
            return self._chunks.popleft()
        if self._error is not None:
            raise self._error
        raise end

    @property
    def ended(self) -> list[Completion]:
        """The continuations that have ended so far, whether read or not."""
        with self._lock:
            return [self._completions[place] for place in sorted(self._completions)]

    async def completion(self) -> Completion:
        """Wait for the (first) completion, without reading chunks.

        Raises:
            GenerationError: the engine refused the request.
            EngineError: the engine's thread has ended.
        """
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Wait for all continuations of the prompt; see `completion`."""
        while True:
            with self._lock:
                if self.is_over:
                    return self._result()
                waiter = _register(self._await_end)
            await waiter

    def wait(self, timeout_s: float | None = None) -> Completion:
        """Block until the (first) completion is available.

        TimeoutError: the timeout has passed.
        """
        return self.wait_all(timeout_s)[0]

    def wait_all(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all continuations of the prompt; see `wait`."""
        with self._lock:
            if not self._sleep_until(lambda: self.is_over, timeout_s):
                raise TimeoutError(f"the request has not ended within {timeout_s} s")
            return self._result()

    def _result(self) -> list[Completion]:
        if self._error is not None:
            raise self._error
        return [self._completions[place] for place in sorted(self._completions)]

    def _sleep_until(self, happened: Callable[[], bool], timeout_s: float | None) -> bool:
        if happened():
            return True
        self._sleeping_threads += 1
        try:
            return self._changed.wait_for(happened, timeout_s)
        finally:
            self._sleeping_threads -= 1

    # ------------------------------------------------------------------- the engine's thread

    def put(self, chunk: Chunk, wakes: Wakes) -> None:
        """Add a chunk, and collect the waiter to wake."""
        with self._lock:
            if self.first_chunk_s is None:
                self.first_chunk_s = time.monotonic()
            if chunk.error is not None:
                self._end(chunk.error, wakes)
            else:
                self._chunks.append(chunk)
                if chunk.completion is not None:
                    self._completions[chunk.choice] = chunk.completion
                    if chunk.is_last:
                        self._end(None, wakes)
            self._wake(wakes)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless the stream is over."""
        wakes = Wakes()
        with self._lock:
            if not self.is_over:
                self._end(error, wakes)
                self._wake(wakes)
        wakes.send()

    def _end(self, error: BaseException | None, wakes: Wakes) -> None:
        self._error, self.is_over, self.ended_s = error, True, time.monotonic()
        wakes.add(self._await_end)
        self._await_end.clear()

    def _wake(self, wakes: Wakes) -> None:
        if self._sleeping_threads:
            self._changed.notify_all()
        if self._readers:
            wakes.add(self._readers)
            self._readers.clear()


def _register(waiters: list[tuple[asyncio.AbstractEventLoop, Waiter]]) -> Waiter:
    loop = asyncio.get_running_loop()
    waiter: Waiter = loop.create_future()
    waiters.append((loop, waiter))
    return waiter


class _Iteration:
    """An iteration over a stream, which cancels the request if dropped before the end."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return next(self._stream)

    def __anext__(self) -> Awaitable[Chunk]:
        # The traceback of a cancelled task holds this object, so its deletion would be too late.
        return self._stream.next_chunk(cancels=True)

    def __del__(self) -> None:
        self._stream.cancel()


def in_order(
    requests: Sequence[Request], submit: Callable[[Request], Stream], most: int
) -> Iterator[Chunk]:
    """Submit requests, at most `most` at a time; yield chunks request by request."""
    begun = deque(submit(request) for request in requests[:most])
    return _in_order(begun, iter(requests[most:]), submit)


def _in_order(
    begun: deque[Stream], left: Iterator[Request], submit: Callable[[Request], Stream]
) -> Iterator[Chunk]:
    try:
        for index in count():
            if not begun:
                return
            for chunk in begun.popleft():
                yield dataclasses.replace(chunk, index=index)
            begun.extend(submit(request) for request in islice(left, 1))
    finally:  # after an error, or if the reader stops, cancel the other requests
        for stream in begun:
            stream.cancel()

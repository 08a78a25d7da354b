"""Streams: a request's output from the engine's thread, for threads and for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition
from typing import Self

from pcg.runtime.requests.request import Chunk, Completion


class Stream:
    """Chunks of one request; one reader iterates, with `for` or `async for`.

    The last chunk carries the completion, also of a request that was cancelled or timed out. An
    error, such as a refusal, is raised where the next chunk would come.
    """

    def __init__(self, cancel: Callable[[Stream], None]) -> None:
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._end: Future[list[Completion]] = Future()
        self._completions: dict[int, Completion] = {}
        self._end.set_running_or_notify_cancel()  # cancelling a wait must not cancel it

    @property
    def is_over(self) -> bool:
        return self._end.done()

    def cancel(self) -> None:
        if not self.is_over:
            self._cancel(self)

    # ------------------------------------------------------------------------------- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self.is_over)
            return self._take(StopIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._chunks or self.is_over:
                    return self._take(StopAsyncIteration)
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def _take(self, end: type[Exception]) -> Chunk:
        if self._chunks:
            return self._chunks.popleft()
        self._end.result()  # raises the error that it ended with
        raise end

    async def completion(self) -> Completion:
        """Wait for the completion, the first of several; chunks need not be read for it.

        Raises:
            GenerationError: the engine refused the request.
            EngineError: the engine's thread has ended.
        """
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Wait for all continuations of the prompt; see `completion`."""
        return await asyncio.wrap_future(self._end)

    def wait(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion in a thread, the first of several.

        TimeoutError: it is not there after so long.
        """
        return self.wait_all(timeout_s)[0]

    def wait_all(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all continuations of the prompt; see `wait`."""
        return self._end.result(timeout_s)

    # ------------------------------------------------------------------- the engine's thread

    def put(self, chunk: Chunk) -> None:
        """Add a chunk; the one with the completion is the last."""
        with self._changed:
            if chunk.error is not None:
                self._end.set_exception(chunk.error)
            else:
                self._chunks.append(chunk)
                if chunk.completion is not None:
                    self._completions[chunk.choice] = chunk.completion
                if chunk.is_last:
                    self._end.set_result([self._completions[i] for i in sorted(self._completions)])
            self._wake()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._end.set_exception(error)
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, waiter in self._waiters:
            with contextlib.suppress(RuntimeError):  # the reader's loop was closed
                loop.call_soon_threadsafe(_set, waiter)
        self._waiters.clear()


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""A request's output as it is made by the engine's thread, for threads and for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition
from typing import Self

from pcg.runtime.engine.request import Chunk, Completion


class Stream:
    """Chunks of one request; one reader iterates, with `for` or `async for`.

    The last chunk carries the completion, also of a request that was cancelled or timed out. An
    error, such as a refusal, is raised where the next chunk would come.
    """

    def __init__(self, cancel: Callable[[Stream], None]) -> None:
        """Wait for the first chunk.

        Args:
            cancel: gives the request up.
        """
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._came = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._end: Future[Completion] = Future()
        self._end.set_running_or_notify_cancel()  # a reader that stops waiting does not end it

    @property
    def is_over(self) -> bool:
        """Whether no more chunks come."""
        return self._end.done()

    def cancel(self) -> None:
        """Give the request up, wherever it is; one that is over stays as it is."""
        if not self.is_over:
            self._cancel(self)

    # ------------------------------------------------------------------------------- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        with self._came:
            self._came.wait_for(lambda: self._chunks or self.is_over)
            return self._take(StopIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        loop = asyncio.get_running_loop()
        while True:
            with self._came:
                if self._chunks or self.is_over:
                    return self._take(StopAsyncIteration)
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def _take(self, end: type[Exception]) -> Chunk:
        if self._chunks:
            return self._chunks.popleft()
        self._end.result()  # raises what it ended by
        raise end

    async def completion(self) -> Completion:
        """The whole, once it is there; chunks need not be read for it.

        Raises:
            GenerationError: the engine refused it.
            EngineError: the engine's thread has ended.
        """
        return await asyncio.wrap_future(self._end)

    def wait(self, timeout_s: float | None = None) -> Completion:
        """The same for threads. TimeoutError: it is not there after so long."""
        return self._end.result(timeout_s)

    # ------------------------------------------------------------------- the engine's thread

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk on; the one with the completion is the last."""
        with self._came:
            self._chunks.append(chunk)
            if chunk.completion is not None:
                self._end.set_result(chunk.completion)
            self._wake()

    def fail(self, error: BaseException) -> None:
        """End by an error."""
        with self._came:
            self._end.set_exception(error)
            self._wake()

    def _wake(self) -> None:
        self._came.notify_all()
        for loop, waiter in self._waiters:
            with contextlib.suppress(RuntimeError):  # the reader's loop was closed
                loop.call_soon_threadsafe(_set, waiter)
        self._waiters.clear()


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

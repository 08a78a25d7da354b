"""Calls to an engine's thread, and streams of requests from submission to the last chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import RLock
from typing import Any, TypeAlias, TypeVar

from pcg.errors import EngineError, as_pcg_error
from pcg.runtime.admission.backlog import Arrivals
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.stream import Stream, Wakes

Result = TypeVar("Result")
StreamMaker: TypeAlias = Callable[[Callable[[Stream], None], str | None], Stream]


class Call:
    """A function to run on the engine's thread between two steps, and its result."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self._act = act

    def run(self) -> None:
        try:
            self.future.set_result(self._act())
        except Exception as error:  # must not end the thread
            self.future.set_exception(error)


class Calls:
    """The queue of calls to the engine's thread; for any thread.

    Attributes:
        ended: the error of further calls after the engine has ended; None before.
        lock: held while a call or a request is added.
    """

    def __init__(self) -> None:
        self.ended: EngineError | None = None
        # Reentrant: garbage collection of a stream cancels its request, also under this lock.
        self.lock = RLock()
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self.qsize = self._queue.qsize
        self.get = self._queue.get
        self.put = self._queue.put

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Queue a call; return the future of its result, or of `ended`."""
        call = Call(act)
        with self.lock:
            if self.ended is None:
                self.put(call)
                return call.future
        call.future.set_exception(self.ended)
        return call.future

    def fail_all(self, error: EngineError) -> None:
        while self.qsize():
            self.get().future.set_exception(error)


class Streams:
    """The requests of an async engine, and the streams of their chunks.

    Attributes:
        open: streams of submitted requests, by the index of their chunks.
        arrivals: requests that wait for their tenant's turn.
        made: chunks of a step that are not queued for delivery yet.

    Args:
        submit: submits a request with its arrival time, on the engine's thread; returns its id.
        end: ends a request by id, with the kind of its end, on the engine's thread.
    """

    def __init__(
        self,
        engine: EngineLoop,
        calls: Calls,
        submit: Callable[[Request, float], str],
        end: Callable[[str, Kind], None],
    ) -> None:
        self.open: dict[int, Stream] = {}
        self.arrivals: Arrivals[Call] = Arrivals(engine.scheduler.backlog)
        self._engine = engine
        self._calls = calls
        self._submit = submit
        self._end = end
        self._wakes = Wakes()
        self.made: deque[Chunk] = deque()
        self._undelivered: deque[Chunk] = deque()

    def __len__(self) -> int:
        return len(self.open) + len(self.arrivals)

    # ------------------------------------------------------------------------------- any thread

    def submit(self, request: Request, make: StreamMaker) -> Stream:
        """Submit a request.

        Args:
            make: constructor of the stream; its arguments are a cancel function and the request id.
        """
        refused = self.refused(request.tenant, make)
        if refused is not None:
            return refused
        stream = make(self._cancel, request.request_id or None)
        call = Call(partial(self._begin, request, stream, self._engine.clock.here_s()))
        call.future.add_done_callback(partial(self._begun, request.tenant, stream))
        with self._calls.lock:
            if self._calls.ended is None:
                if self.arrivals.add(request.tenant, stream, call):
                    self._calls.put(call)
                return stream
        stream.fail(self._calls.ended)
        return stream

    def refused(self, tenant: str, make: StreamMaker = Stream) -> Stream | None:
        """Return a failed stream if too many requests wait; None to accept the request."""
        full = self.arrivals.why_full(tenant)
        if full is None:
            return None
        with self._calls.lock:
            self._engine.totals.turned_away += 1
        stream = make(self._cancel, None)
        stream.fail(full)
        return stream

    def _cancel(self, stream: Stream) -> None:
        """Cancel a request; a request that waits for its turn ends when its turn comes."""

        def act() -> None:
            if not stream.is_over:
                self._end_of(stream)

        with self._calls.lock:
            stream.is_cancelled = True
            if not stream.has_begun:
                return
        self._calls.call(act)

    # ------------------------------------------------------------------------------- the thread

    def cancel(self, request_id: str) -> None:
        """Cancel a request by id; no effect if the id is unknown."""
        with self._calls.lock:
            stream = self.arrivals.find(request_id)
            if stream is not None:
                stream.is_cancelled = True
        self._end(request_id, Kind.CANCELLED)

    def cancel_all(self, kind: Kind = Kind.CANCELLED) -> None:
        """End all submitted requests; `kind` may be TIMED_OUT."""
        for stream in self.open.values():
            self._end_of(stream, kind)

    def _end_of(self, stream: Stream, kind: Kind = Kind.CANCELLED) -> None:
        assert stream.request_id is not None
        self._end(stream.request_id, kind)

    def _arrived(self, tenant: str, stream: Stream) -> None:
        with self._calls.lock:
            following = self.arrivals.taken(tenant, stream)
            if following is not None:
                self._calls.put(following)

    def _begun(self, tenant: str, stream: Stream, begun: Future[None]) -> None:
        """Fail the stream of a request that could not be submitted."""
        error = begun.exception()
        if error is not None:
            stream.fail(error)
            self._arrived(tenant, stream)

    def _begin(self, request: Request, stream: Stream, submitted_s: float) -> None:
        self._arrived(request.tenant, stream)
        number = self._engine.submitted
        stream.request_id = self._submit(request, submitted_s)
        self.open[number] = stream
        with self._calls.lock:
            stream.has_begun = True
        if stream.is_cancelled:
            self._end_of(stream)

    def add_made(self, watcher: Callable[[Wakes], None] | None) -> None:
        """Queue the chunks of a step for delivery, after delivering earlier chunks."""
        if self._undelivered or not self.made:
            self.deliver(watcher)
        while self.made:
            self._undelivered.append(self.made.popleft())

    def deliver_all(self, watcher: Callable[[Wakes], None] | None) -> None:
        """Deliver the chunks of a step, and those that a failed round left."""
        self.add_made(watcher)
        self.deliver(watcher)

    def deliver(self, watcher: Callable[[Wakes], None] | None) -> None:
        """Give chunks to their streams, and wake their readers.

        Args:
            watcher: function to call first; its argument collects wakes. None for no function.
        """
        if watcher is not None:
            watcher(self._wakes)
        self._undelivered += self._engine.requests.take_chunks()
        while self._undelivered:
            chunk = self._undelivered.popleft()
            stream = self.open.get(chunk.index)
            if stream is None:
                continue
            try:
                stream.put(chunk, self._wakes)
            except Exception as error:  # fails this request only
                assert stream.request_id is not None
                stream.fail(as_pcg_error(error, stream.request_id, EngineError))
                self._end_of(stream)
            if chunk.is_last or stream.is_over:
                del self.open[chunk.index]
        self._wakes.send()

    def fail_all(self, error: EngineError) -> None:
        """Fail all streams, after the engine has ended."""
        with self._calls.lock:
            held = self.arrivals.clear()
        for stream in (*self.open.values(), *held):
            stream.fail(error)

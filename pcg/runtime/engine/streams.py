"""The calls of an engine's thread, and its requests from their submission to their last chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
    """A function to run on the thread between two steps, and its result."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self._act = act

    def run(self) -> None:
        try:
            self.future.set_result(self._act())
        except Exception as error:  # the caller's, not the thread's
            self.future.set_exception(error)


class Calls:
    """The calls that wait for the thread; for any thread.

    Attributes:
        ended: the error of later calls; None before the end.
        lock: held by who adds a call, or a request.
    """

    def __init__(self) -> None:
        self.ended: EngineError | None = None
        # A stream that is collected cancels its request, also while this thread holds the lock.
        self.lock = RLock()
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self.qsize = self._queue.qsize
        self.get = self._queue.get
        self.put = self._queue.put

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Add a call; returns its result, or the error after the end."""
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
    """The requests of an engine on a thread, and the streams of their chunks.

    Attributes:
        open: the streams of requests that the engine has, by the index of their chunks.
        arrivals: requests that wait for their tenant's turn.

    Args:
        submit: submits a request that came at a time, on the thread; returns its id.
        end: ends a request by its id and the kind of its end, on the thread.
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
        self._undelivered: deque[Chunk] = deque()

    def __len__(self) -> int:
        return len(self.open) + len(self.arrivals)

    # ------------------------------------------------------------------------------- any thread

    def submit(self, request: Request, make: StreamMaker) -> Stream:
        """Submit a request.

        Args:
            make: makes its stream, of a function that cancels it and the request's id.
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
        """Return the stream of a request that is refused, as too many wait; None to take it."""
        full = self.arrivals.why_full(tenant)
        if full is None:
            return None
        with self._calls.lock:
            self._engine.totals.turned_away += 1
        stream = make(self._cancel, None)
        stream.fail(full)
        return stream

    def _cancel(self, stream: Stream) -> None:
        """End a request; one that has not begun ends when it begins, in its tenant's turn."""

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
        """End a request by its id; nothing happens if there is none."""
        with self._calls.lock:
            stream = self.arrivals.find(request_id)
            if stream is not None:
                stream.is_cancelled = True
        self._end(request_id, Kind.CANCELLED)

    def cancel_all(self, kind: Kind = Kind.CANCELLED) -> None:
        """End the requests that the engine has; `kind` may be TIMED_OUT."""
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
        """Fail a stream that could not begin."""
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

    def add(self, chunks: Sequence[Chunk], watcher: Callable[[Wakes], None] | None) -> None:
        """Add the chunks of a step, after those before it are delivered."""
        if self._undelivered or not chunks:  # the step ran nothing, or gave nothing
            self.deliver(watcher)
        self._undelivered += chunks

    def deliver(self, watcher: Callable[[Wakes], None] | None) -> None:
        """Give chunks to their streams, and wake their readers.

        Args:
            watcher: is called first, with the wakes that are sent; None for nobody.
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
            except Exception as error:  # the request's own, which goes on for nobody
                assert stream.request_id is not None
                stream.fail(as_pcg_error(error, stream.request_id, EngineError))
                self._end_of(stream)
            if chunk.is_last or stream.is_over:
                del self.open[chunk.index]
        self._wakes.send()

    def fail_all(self, error: EngineError) -> None:
        """End all streams, once nothing is added any more."""
        with self._calls.lock:
            held = self.arrivals.clear()
        for stream in (*self.open.values(), *held):
            stream.fail(error)

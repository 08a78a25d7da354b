"""The thread that runs an engine's steps: calls of others between two of them, and streams.

Only this thread touches the engine. It sleeps while there is nothing to do, and ends every stream
when it ends itself. Calls take at most a millisecond between two steps that serve, and 3 % of a
step's time where several tenants are served; what is left of them waits for the next ones.

On a GPU the chunks of a step are delivered while the next one runs.

The thread does not keep the process alive: where the process ends, the thread ends after its step,
and a fork, which has no such thread, is told so.

While such a thread runs, Python's threads take turns every 20 µs and not every 5 ms: each operation
of a step gives the interpreter's lock away, and gets it back after a turn of another thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import RLock, current_thread
from typing import Self, TypeAlias, TypeVar
from weakref import WeakSet

import torch

from pcg.errors import EngineError, as_pcg_error
from pcg.kernels.devices import device_thread
from pcg.runtime.admission.backlog import Arrivals
from pcg.runtime.engine.calls import Call
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.stream import Stream, Wakes

Result = TypeVar("Result")
StreamMaker: TypeAlias = Callable[[Callable[[Stream], None], str | None], Stream]

_LOG = logging.getLogger("pcg.engine")

_RETRIES = 3
"""Rounds in a row that may fail."""
_BLOCKED_S = 0.01
"""Time between two steps that find nothing to run, as when a paused job holds the pages."""
_CALLS_S = 1e-3
"""Time that calls take between two steps."""
_CALLS_SHARE = 0.03
"""The most of it, as a share of the last step, where one tenant's calls would delay another's."""
_EXIT_S = 10.0
"""The longest that the end of the process waits for the end of a step."""
_SWITCH_S = 2e-5
"""A turn of Python's threads. Beside one that compiled adapters' programs, gaps of 8 ms were 40 ms
at the 99th percentile with Python's default of 5 ms, and 11 ms with 100 µs; beside a hostile tenant
(`benchmarks/soak_tenants.py`) gaps of 7.6 ms were 11.8 ms with 100 µs and 10.2 ms with 20 µs."""


class StepThread(ABC):
    """Takes requests and calls from any thread; a context manager, with `async` or without.

    Attributes:
        engine: the engine, which nobody else may call.
        device: the device of its steps.
        ended: the error that is raised after the end; None before.
        watcher: called on the thread, with what is sent behind it, where the engine's numbers may
            have changed: once a step is planned, at its end and behind calls; None for nobody.
    """

    def __init__(self, engine: EngineLoop, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.ended: EngineError | None = None
        self.watcher: Callable[[Wakes], None] | None = None
        self._refusal: EngineError | None = None
        self._closing = False
        self._calls: SimpleQueue[Call] = SimpleQueue()
        engine.awaited = self._is_called
        # A stream that is collected cancels its request, also while this thread holds the lock.
        self._lock = RLock()
        self._streams: dict[int, Stream] = {}
        self._arrivals: Arrivals[Call] = Arrivals(engine.scheduler.backlog)
        self._wakes = Wakes()
        self._step_began: float | None = None
        self._latest_step_s = 0.0
        self._paused_until = -math.inf
        self._undelivered: deque[Chunk] = deque()
        self._failures = 0
        self._thread = device_thread(device, self._run, "pcg engine")
        _MADE.add(self)

    # ------------------------------------------------------------------------------- for any thread

    def submit_request(self, request: Request, make: StreamMaker = Stream) -> Stream:
        """Submit a request that `Executor.request` made.

        Args:
            make: makes its stream, of a function that cancels it and the request's id.
        Raises:
            EngineError: the thread has ended, or takes no requests any more.
        """
        self._check_open()
        refused = self._refused(request.tenant, make)
        if refused is not None:
            return refused
        stream = make(self._cancel, request.request_id or None)
        call = Call(functools.partial(self._begin, request, stream, self.engine.clock.here_s()))
        call.future.add_done_callback(functools.partial(self._begun, request.tenant, stream))
        with self._lock:
            if self.ended is None:
                if self._arrivals.add(request.tenant, stream, call):
                    self._calls.put(call)
                return stream
        stream.fail(self.ended)
        return stream

    def _refused(self, tenant: str, make: StreamMaker = Stream) -> Stream | None:
        """Return the stream of a request that is refused, as too many wait; None to take it."""
        full = self._arrivals.why_full(tenant)
        if full is None:
            return None
        with self._lock:
            self.engine.totals.turned_away += 1
        stream = make(self._cancel, None)
        stream.fail(full)
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request, from the next step on; nothing happens where there is none of that id."""

        def act() -> None:
            with self._lock:
                stream = self._arrivals.find(request_id)
                if stream is not None:
                    stream.is_cancelled = True
            self.engine.cancel(request_id)

        self.call(act)

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps; returns its result, an EngineError after the end."""
        call = Call(act)
        with self._lock:
            if self.ended is None:
                self._calls.put(call)
                return call.future
        call.future.set_exception(self.ended)
        return call.future

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a function between two steps, and wait for it; on the engine's own thread now."""
        return act() if current_thread() is self._thread else self.call(act).result()

    def pause(self, timeout_s: float) -> Future[None]:
        """Run no step from the next one on, of requests or of jobs; all are kept as they are.

        Args:
            timeout_s: time after which steps go on by themselves, seconds.
        Returns:
            What is done once no step runs.
        """

        def act() -> None:
            if self._refusal is None:  # which has an end
                self._paused_until = time.monotonic() + timeout_s

        return self.call(act)

    def go_on(self) -> Future[None]:
        """Run steps again."""

        def act() -> None:
            self._paused_until = -math.inf

        return self.call(act)

    def join(self) -> EngineError:
        """Wait until the thread has ended, and return why."""
        self._thread.join()
        assert self.ended is not None
        return self.ended

    def close(self) -> None:
        """End the thread after its step, and cancel what is left."""
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        def stop() -> None:
            self._closing = True

        self.call(stop)
        if current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout_s)

    def _forget(self) -> None:
        """End in a fork, where another thread may have held the lock."""
        self._lock = RLock()
        self.ended = EngineError(
            "the engine runs in the process of which this one is a fork; make one here, in a "
            "process that is spawned and not forked"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def step_s(self) -> float | None:
        """Seconds since the step under way began; None between two steps."""
        began = self._step_began
        return None if began is None else time.monotonic() - began

    def _is_called(self) -> bool:
        return not self._calls.empty()

    def _check_open(self) -> None:
        error = self.ended or self._refusal
        if error is not None:
            raise error

    def _cancel(self, stream: Stream) -> None:
        """End a request; one that has not begun ends when it begins, in its tenant's turn."""

        def act() -> None:
            if not stream.is_over:
                assert stream.request_id is not None
                self.engine.cancel(stream.request_id)

        with self._lock:
            stream.is_cancelled = True
            if not stream.has_begun:
                return
        self.call(act)

    # ------------------------------------------------------------------------------- the thread

    @abstractmethod
    def _settle(self) -> None:
        """Do what is due after a step, or after calls."""

    @abstractmethod
    def _cancel_all(self) -> None:
        """Cancel what is left beside requests, before the thread ends."""

    @abstractmethod
    def _fail_all(self, error: EngineError) -> None:
        """End what still waits beside streams, once the thread has ended."""

    def _run(self) -> None:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, interval_s))
        ended = EngineError("the engine was closed; start it again")
        self.engine.meanwhile = self._deliver
        try:
            while not self._closing:
                self._go_round()
            for stream in self._streams.values():
                assert stream.request_id is not None
                self.engine.cancel(stream.request_id)
            self._cancel_all()
            if self._streams:
                self._step()
        except BaseException as error:
            ended = EngineError(f"the engine's thread ended by {type(error).__name__}: {error}")
            ended.__cause__ = error
        self.engine.meanwhile = None
        with contextlib.suppress(Exception):
            self._deliver()
        sys.setswitchinterval(interval_s)
        self._end(ended)

    def _go_round(self) -> None:
        """Run calls and a step, and deliver what it gave.

        The error of a step or of a call ends its owner there. Any other error has no owner: the
        next round does what is left, unless several rounds fail in a row.
        """
        try:
            self._run_calls()
            if self._closing or self._rests:
                self._deliver()
            else:
                self._step()
            self._settle()
            self._failures = 0
        except Exception:
            self._failures += 1
            is_lone = self.engine.device.fails_alike  # ranks go on alike, or not at all
            if self._failures > _RETRIES or self.engine.is_broken or not is_lone:
                raise
            _LOG.exception("a round of the engine's thread failed; it goes on with the next")

    def _run_calls(self) -> None:
        engine = self.engine
        try:
            if engine.is_idle:
                self._next_call(None).run()
            elif self._rests:
                self._next_call(max(0.0, self._paused_until - time.monotonic())).run()
            elif not engine.worked:
                self._next_call(_BLOCKED_S).run()
            until = time.monotonic() + self._calls_s
            while self._rests or time.monotonic() < until:
                self._calls.get_nowait().run()
        except Empty:
            return

    def _next_call(self, timeout_s: float | None) -> Call:
        """Wait for a call. Empty: there is none after so long."""
        return self._calls.get(timeout=timeout_s)

    @property
    def _rests(self) -> bool:
        """True while no step is to be run."""
        return self.engine.is_idle or time.monotonic() < self._paused_until

    @property
    def _calls_s(self) -> float:
        """Return the time that calls have before the next step."""
        is_shared = self.engine.scheduler.policy.is_shared
        return min(_CALLS_S, _CALLS_SHARE * self._latest_step_s) if is_shared else _CALLS_S

    def _arrived(self, tenant: str, stream: Stream) -> None:
        with self._lock:
            following = self._arrivals.taken(tenant, stream)
            if following is not None:
                self._calls.put(following)

    def _begun(self, tenant: str, stream: Stream, done: Future[None]) -> None:
        """Fail a stream that could not begin."""
        error = done.exception()
        if error is not None:
            stream.fail(error)
            self._arrived(tenant, stream)

    def _begin(self, request: Request, stream: Stream, submitted_s: float) -> None:
        self._arrived(request.tenant, stream)
        number = self.engine.submitted
        stream.request_id = self.engine.submit(request, submitted_s)
        self._streams[number] = stream
        with self._lock:
            stream.has_begun = True
        if stream.is_cancelled:
            self.engine.cancel(stream.request_id)

    def _step(self) -> None:
        began = self._step_began = time.monotonic()
        chunks = self.engine.step()
        self._latest_step_s = time.monotonic() - began
        self._step_began = None
        if self._undelivered or not chunks:  # the step ran nothing, or gave nothing
            self._deliver()
        self._undelivered += chunks
        if not self._runs_ahead:
            self._deliver()

    @property
    def _runs_ahead(self) -> bool:
        """True if the next step begins at once, on a device that works beside this thread.

        Chunks are then delivered while it runs; at once where another one runs already.
        """
        engine = self.engine
        is_next = engine.worked and not (engine.is_idle or self._closing)
        return is_next and engine.device.side is not None and not engine.is_ahead

    def _deliver(self) -> None:
        if self.watcher is not None:
            self.watcher(self._wakes)
        self._undelivered += self.engine.requests.take_chunks()
        while self._undelivered:
            chunk = self._undelivered.popleft()
            stream = self._streams.get(chunk.index)
            if stream is None:
                continue
            try:
                stream.put(chunk, self._wakes)
            except Exception as error:  # the request's own, which goes on for nobody
                assert stream.request_id is not None
                stream.fail(as_pcg_error(error, stream.request_id, EngineError))
                self.engine.cancel(stream.request_id)
            if chunk.is_last or stream.is_over:
                del self._streams[chunk.index]
        self._wakes.send()

    def _end(self, error: EngineError) -> None:
        """Refuse further calls, and fail all that still waits."""
        with self._lock:
            self.ended = error
            held = self._arrivals.clear()
        for stream in (*self._streams.values(), *held):
            stream.fail(error)
        self._fail_all(error)
        while not self._calls.empty():
            self._calls.get().future.set_exception(error)


_MADE: WeakSet[StepThread] = WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads with the process: one within a kernel would abort it."""
    for one in list(_MADE):
        one._close(_EXIT_S)


def _forget_all() -> None:
    for one in list(_MADE):
        one._forget()


os.register_at_fork(after_in_child=_forget_all)

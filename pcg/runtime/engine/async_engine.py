"""The async engine: runs an engine on a thread, with streams of requests and awaitable jobs.

    with executor.engine(limits).start() as engine:
        stream = engine.submit("def main(", adapter="sql", max_new_tokens=64)
        job = engine.finetune("train.jsonl", "mine", peft="lora")
        async for chunk in stream: …
        result = await job.result()

Only the engine's thread accesses the engine. It sleeps while the engine is idle, and ends all
streams and jobs when it exits. Between two steps, calls from other threads take at most 1 ms, or
3 % of a step's time if several tenants share the engine; the remaining calls wait for the next gap.
On a GPU, the chunks of a step are delivered while the next step runs.

The thread is a daemon: it ends after its current step when the process exits. A forked process has
no such thread, so its calls raise an error. While the thread runs, Python's thread switch interval
is 20 µs instead of 5 ms, because each operation of a step releases the interpreter lock and then
waits for another thread's turn.

With several ranks, each rank has an async engine, and rank 0 takes the calls (`replicas.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty
from threading import Event, RLock, current_thread
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

from pcg.errors import (
    DrainingError,
    EngineError,
    FinetuneError,
    ParallelError,
    UnsupportedError,
)
from pcg.kernels.devices import device_thread
from pcg.keywords import takes
from pcg.peft.adapter import Adapter
from pcg.ranks.line import BEAT_S
from pcg.runtime.data.sources import DataLimits
from pcg.runtime.engine.adapter_loads import Loads
from pcg.runtime.engine.engine_status import adapters_of, most_tokens, numbers_of, running_of
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.preparation import Preparation
from pcg.runtime.engine.rank_commands import Cancel, ChangeJob, RankCommand, RemoveAdapter, Step
from pcg.runtime.engine.replicas import Follower, Leader
from pcg.runtime.engine.running_job import RunningJob, RunningJobs
from pcg.runtime.engine.scheduling.guest_work import GuestWork
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.streams import Call, Calls, StreamMaker, Streams
from pcg.runtime.engine.thread_switching import switching_every
from pcg.runtime.engine.trainers import AsyncTrainer, Trainers
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import (
    AdapterStatus,
    EngineNumbers,
    EngineState,
    Health,
    JobStatus,
    RunningStatus,
)
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.request import Chunk, Request, RequestFields, make_request
from pcg.runtime.requests.stream import Stream, Wakes, in_order
from pcg.runtime.training.options import JobArguments
from pcg.runtime.training.trainer.datum import TrainerArguments
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter

Result = TypeVar("Result")

_LOG = logging.getLogger("pcg.engine")

_RETRIES = 3
"""Number of consecutive rounds that may fail."""
_BLOCKED_S = 0.01
"""Time between two steps that run nothing, for example while a paused job holds the pages."""
_CALLS_S = 1e-3
"""Time limit of calls between two steps."""
_CALLS_SHARE = 0.03
"""Time limit of calls if several tenants share the engine, relative to the last step."""
_EXIT_S = 10.0
"""Time limit of waiting for the current step when the process exits."""
_SWITCH_S = 2e-5
"""Python's thread switch interval. p99 gap between tokens during compilation of adapter programs,
8 ms undisturbed: 40 ms with Python's default of 5 ms, 11 ms with 100 µs. With a hostile tenant
(`benchmarks/soak.py`), 7.6 ms undisturbed: 11.8 ms with 100 µs, 10.2 ms with 20 µs."""


class AsyncEngine:
    """Takes requests, jobs and trainers from any thread; a context manager, also an async one.

    Attributes:
        engine: the engine; only the engine's thread may call it.
        state: the model's state.
        device: the device that runs the steps.
        watcher: function to call on the engine's thread when the engine's numbers may have changed:
            after planning a step, after the step and after calls. Its argument collects wakes,
            which are sent afterwards. None for no function.
        preparation: the threads that prepare jobs and adapters.
        trainers: the open trainers.
    """

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        prepare_trainer: Callable[[TrainerArguments], TrainedAdapter],
        data_limits: DataLimits,
        seat: Leader | Follower | None = None,
    ) -> None:
        """Start the thread.

        Args:
            seat: the role of this rank in an engine over several ranks; None for a single rank.
        """
        self.engine = engine
        self.state = state
        self.device = state.device
        self.watcher: Callable[[Wakes], None] | None = None
        self._seat = seat
        self._leader = seat if isinstance(seat, Leader) else None
        self._refusal: EngineError | None = None
        self._closing = False
        self._calls = Calls()
        self._streams = Streams(engine, self._calls, self._submit, self._end_request)
        engine.awaited = self._is_called
        self._step_began: float | None = None
        self._latest_step_s = 0.0
        self._paused_until = -math.inf
        self._failures = 0
        self.preparation = Preparation(state, data_limits)
        self.trainers = Trainers(self, prepare_trainer)
        if self._leader is not None:
            prepare_job = self._leader.prepare_everywhere
        self._jobs = RunningJobs(self, prepare_job)
        self._loads = Loads(
            state,
            self.preparation,
            call=self.call,
            check_open=self.check_open,
            check_unreserved=self._jobs.check_unreserved,
            remove=self._remove_adapter,
            spread=None if self._leader is None else self._leader.spread,
        )
        self._drained: Future[None] = Future()
        self._drained.set_running_or_notify_cancel()
        self._drain_until = math.inf
        self._over = Event() if seat is None else seat.over
        state.engine_thread = self
        self._thread = device_thread(state.device, self._run, "pcg engine")
        _MADE.add(self)
        self._thread.start()
        if seat is not None:
            seat.watch(self._lose)

    # ------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Stream:
        """Submit a prompt; see `Executor.request`. EngineError: the thread has ended."""
        self.check_open()
        tenant = fields.get("tenant", "")
        # Refuse before parsing the request, so that a flood of requests holds the GIL briefly.
        refused = self._streams.refused(tenant) if isinstance(tenant, str) else None
        return refused or self.submit_request(make_request(self.state, prompt, adapter, fields))

    def submit_request(self, request: Request, make: StreamMaker = Stream) -> Stream:
        """Submit a request that `Executor.request` returned.

        Args:
            make: constructor of the stream; its arguments are a cancel function and the request id.
        Raises:
            EngineError: the thread has ended, or the engine is draining.
        """
        self.check_open()
        return self._streams.submit(request, make)

    def stream_all(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests and yield their chunks, request by request in the given order.

        The engine's queue holds at most two batches of the requests, so their number is unlimited.

        Raises:
            EngineError: the thread has ended, or is the caller, which cannot wait for itself.
        """
        self._check_takes()
        if current_thread() is self._thread:
            raise EngineError(
                "a callback of the engine waits for the engine; submit a request there"
            )
        most = 2 * self.engine.scheduler.limits.running
        return in_order(requests, self.submit_request, most)

    def cancel(self, request_id: str) -> None:
        """Cancel a request before the next step; no effect if the id is unknown."""
        self.call(lambda: self._streams.cancel(request_id))

    # ------------------------------------------------------------------------------- jobs

    @takes(JobArguments, FinetuneError)
    def finetune(self, arguments: JobArguments) -> RunningJob:
        """Train an adapter while requests are served; awaiting the result raises data errors.

        Raises:
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        return self._jobs.begin(arguments)

    def jobs(self) -> list[JobStatus]:
        """Return the status of each job in order of submission, with the last 64 ended jobs."""
        return [running.status for running in list(self._jobs.listed)]

    @takes(TrainerArguments, FinetuneError)
    def trainer(self, arguments: TrainerArguments) -> AsyncTrainer:
        """Create a trainer, which trains an adapter by commands while requests are served.

        The call returns immediately. `created` and all later calls raise errors of the recipe.

        Raises:
            AdapterConflictError: a job or trainer already trains an adapter of that name.
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        return self.begin_trainer(arguments)

    def begin_trainer(self, arguments: TrainerArguments) -> AsyncTrainer:
        """Create a trainer as `trainer` does, from an arguments object."""
        if self._seat is not None:
            what = f"trainers over {self._seat.size} ranks"
            raise UnsupportedError(f"{what}; use one, or finetune")
        return self.trainers.begin(arguments)

    def compile_aside(self, act: Callable[[], None]) -> None:
        if self._seat is None:
            self.preparation.compile(act)
        else:  # ranks compile together, between two steps
            self.call(act)

    # ------------------------------------------------------------------------------- adapters

    def add_adapter(
        self,
        name: str,
        path_or_config: object = "lora",
        *,
        seed: int = 0,
        replace: bool = False,
        expected_version: int | None = None,
    ) -> Future[Adapter]:
        """Load an adapter: read it and compile its program in the background while steps run.

        Calls for the same name run in order. With `replace`, requests that were submitted before
        the new version is installed keep the old version to their ends.

        Returns:
            Future of the adapter, done once requests may name the adapter. Its error is an error of
                `Executor.add_adapter` or an EngineError.
        """
        self.check_open()
        free = partial(self.state.check_free, name, replace=replace)
        check = partial(free, expected_version=expected_version)
        return self._loads.add(name, path_or_config, seed, check)

    def remove_adapter(self, name: str) -> Future[None]:
        """Remove an adapter between two steps; running requests keep the adapter.

        Returns:
            Future that is done once earlier calls for the name have ended and the name is removed.
                Its error is an AdapterError if the name is unknown or a job trains the adapter, or
                an EngineError.
        """
        self._check_takes()
        return self._loads.remove(name)

    def _remove_adapter(self, name: str) -> None:
        with self.asked(RemoveAdapter, name):
            self.state.remove_adapter(name)

    def adapters(self) -> list[AdapterStatus]:
        """Return the adapters that requests may name, without waiting for a step."""
        return adapters_of(self.engine, self.state)

    def most_tokens(self, adapter: Adapter | None) -> int:
        """Return the maximum length of prompt and output for which the pool has pages."""
        return most_tokens(self.engine, adapter)

    # ------------------------------------------------------------------------------- status

    def running(self) -> list[RunningStatus]:
        """Return the running requests in order of admission, without waiting for a step."""
        return running_of(self.engine)

    def numbers(self) -> EngineNumbers:
        """Return current numbers and totals since the start, without waiting for a step."""
        return numbers_of(self.engine)

    def health(self) -> Health:
        """Return whether the thread runs and takes requests, without waiting for a step."""
        if self.ended is not None:
            return Health(EngineState.ENDED, str(self.ended), None)
        state = EngineState.RUNNING if self._refusal is None else EngineState.DRAINING
        began = self._step_began
        return Health(state, None, None if began is None else time.monotonic() - began)

    @property
    def ended(self) -> EngineError | None:
        """The error that calls raise after the engine has ended; None before."""
        return self._calls.ended

    # ------------------------------------------------------------------------------- calls

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps; return its future, failed after the engine's end."""
        self._check_takes()
        return self._calls.call(act)

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a function between two steps and wait; on the engine's thread, run it immediately.

        Raises:
            UnsupportedError: several ranks run the steps.
        """
        if self._seat is not None:
            raise UnsupportedError(
                f"a function between two steps of {self._seat.size} ranks, which the others do not "
                "know; close the engine first, and make the call on all ranks"
            )
        return act() if current_thread() is self._thread else self.call(act).result()

    def host(self) -> GuestWork:
        """Return the queue for guests' work, which runs in the time that steps leave."""
        if self._seat is not None:
            raise UnsupportedError(
                f"the engine of {self._seat.size} ranks runs no products of clients; use one rank, "
                "or pcg serve-base --tp"
            )
        guests = GuestWork(self.call, lambda: self.engine.is_idle, self._is_called)
        self.engine.parts.guests = guests
        return guests

    def pause(self, timeout_s: float) -> Future[None]:
        """Stop running steps; requests and jobs keep their state.

        Args:
            timeout_s: time until steps resume automatically, seconds.
        Returns:
            Future that is done once no step runs.
        """

        def act() -> None:
            if self._refusal is None:  # a draining engine keeps running, to come to its end
                self._paused_until = time.monotonic() + timeout_s

        return self.call(act)

    def go_on(self) -> Future[None]:
        """Resume steps after `pause`."""

        def act() -> None:
            self._paused_until = -math.inf

        return self.call(act)

    def check_open(self) -> None:
        """Raise an EngineError if the engine accepts no new work."""
        self._check_takes()
        error = self.ended or self._refusal
        if error is not None:
            raise error

    def _check_takes(self) -> None:
        """Raise an EngineError on a follower rank."""
        if self._seat is not None:
            self._seat.check_takes(self.ended)

    def _is_called(self) -> bool:
        is_called = self._calls.qsize() > 0
        return is_called if self._seat is None else self._seat.is_called(is_called)

    # ------------------------------------------------------------------------------- draining

    def drain(self, timeout_s: float | None = None) -> Future[None]:
        """Finish the accepted work and refuse new work with a DrainingError.

        Requests run to their ends. A job ends after its current step, as after Ctrl-C: it writes a
        checkpoint if it has a `checkpoint_dir`, and fails with a `FinetuneInterrupted` that says
        how to resume. The thread runs until `close`, so that the status remains readable.

        Args:
            timeout_s: time after which the remaining work is cancelled, seconds; None for never.
        Returns:
            Future that is done once no work is left.
        """
        self._check_takes()
        if timeout_s is not None and not timeout_s > 0:
            raise EngineError(f"timeout_s={timeout_s!r}; use seconds above 0, or None")
        if self._refusal is None:
            self._refusal = DrainingError("the engine ends its work and takes nothing new")
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.call(partial(self._drain, until))
        return self._drained

    def _drain(self, until: float) -> None:
        self._drain_until = min(self._drain_until, until)
        self._paused_until = -math.inf
        if self._jobs.refusal is None and self._refusal is not None:
            self._jobs.refuse(self._refusal)

    def _go_on_draining(self) -> None:
        """Cancel remaining work after the timeout; complete the drain once no work is left."""
        is_late = time.monotonic() > self._drain_until
        if is_late:
            self.trainers.cancel_all()
            self._streams.cancel_all(Kind.TIMED_OUT)
        if is_late or self.engine.is_idle:
            for job in list(self.engine.jobs) if self.engine.has_jobs else ():
                with self.asked(ChangeJob, job.name, "cancel"):
                    self.engine.cancel_job(job.name)
        is_left = self._streams or self._jobs.running or self._jobs.reserved
        if not (is_left or self.trainers.are_busy or self._drained.done()):
            self._drained.set_result(None)

    # ------------------------------------------------------------------------------- the end

    def join(self) -> EngineError:
        """Wait until the engine has ended, and return the reason."""
        self._over.wait()
        if self._seat is None:
            self._thread.join()
        assert self.ended is not None
        return self.ended

    def follow(self) -> None:
        """Wait on a follower rank until rank 0 closes its engine.

        Raises:
            EngineError: the engine ended by an error, for example because a rank was lost.
        """
        error = self.join()
        if error.__cause__ is not None:
            raise error

    def close(self) -> None:
        """End the thread after its step and cancel remaining work; a follower waits for rank 0."""
        if isinstance(self._seat, Follower):
            self.follow()
        else:
            self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        def stop() -> None:
            self._closing = True

        if not isinstance(self._seat, Follower):
            self.call(stop)
        if current_thread() is not self._thread:
            self._over.wait(timeout_s)
            if self._seat is None:
                self._thread.join(timeout_s)

    def _forget(self) -> None:
        """End the engine in a forked process, where another thread may have held the lock."""
        self._calls.lock, self._over = RLock(), Event()
        self._over.set()
        self._calls.ended = EngineError(
            "the engine runs in the process of which this one is a fork; make one here, in a "
            "process that is spawned and not forked"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if isinstance(self._seat, Follower) and raised[1] is not None:
            self._seat.leave(f"{type(raised[1]).__name__}: {raised[1]}")
        else:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.__exit__, *raised)

    def _lose(self, word: str) -> None:
        """End the engine even if its thread still waits for a lost rank."""
        assert self._seat is not None
        error = EngineError(f"the engine over {self._seat.size} ranks ended: {word}")
        error.__cause__ = ParallelError(word)
        if self._end(error):
            self._seat.leave(str(error))
            self._finish()

    def _end(self, error: EngineError) -> bool:
        """Refuse further calls and fail all pending work; return True on the first call."""
        with self._calls.lock:
            if self.ended is not None:
                return False
            self._calls.ended = error
            self.state.engine_thread = None
        self._streams.fail_all(error)
        self.trainers.fail_all(error)
        self._jobs.fail_all(error)
        self.preparation.close()  # after fail_all, so that handles keep the engine's error
        if current_thread() is self._thread and self.engine.has_jobs:
            for job in self.engine.jobs:
                job.cancel()
        if not self._drained.done():
            self._drained.set_result(None)
        self._calls.fail_all(error)
        return True

    def _finish(self) -> None:
        with self._calls.lock:
            if self._seat is not None and not self._over.is_set():
                self._seat.free()
            self._over.set()

    # ------------------------------------------------------------------------------- the thread

    def asked(
        self, command: Callable[..., RankCommand], *fields: Any
    ) -> AbstractContextManager[None]:
        """Broadcast a command for the action that rank 0 performs within the `with`."""
        return nullcontext() if self._leader is None else self._leader.asked(command(*fields))

    def _end_request(self, request_id: str, kind: Kind = Kind.CANCELLED) -> None:
        with self.asked(Cancel, request_id, kind.value):
            self.engine.cancel(request_id, kind)

    def _run(self) -> None:
        seat, leader = self._seat, self._leader
        try:
            self._end(seat.follow() if isinstance(seat, Follower) else self._serve())
            assert self.ended is not None
            if leader is not None:
                leader.end(self.ended)
            if seat is not None and self.ended.__cause__ is not None:
                seat.leave(str(self.ended))
        finally:
            self._finish()

    def _serve(self) -> EngineError:
        """Run calls and steps until the end; return the reason of the end."""
        ended = EngineError("the engine was closed; start it again")
        self.engine.meanwhile = self._deliver
        try:
            with switching_every(_SWITCH_S):
                while not self._closing:
                    self._go_round()
            self._streams.cancel_all()
            self.trainers.cancel_all()
            self._jobs.cancel_all()
            if self._streams.open:
                self._step()
        except BaseException as error:
            ended = EngineError(f"the engine's thread ended by {type(error).__name__}: {error}")
            ended.__cause__ = error
        self.engine.meanwhile = None
        with contextlib.suppress(Exception):
            self._deliver()
        return ended

    def _go_round(self) -> None:
        """Run calls and a step, and deliver the chunks.

        An error in a step or a call has already been handled by ending its owner. After any other
        error the next round continues, unless several consecutive rounds fail.
        """
        try:
            self._run_calls()
            if self._closing or self._rests:
                self._streams.deliver_all(self.watcher)
            else:
                self._step()
            if self._jobs.running:
                self._jobs.settle()
            if self.trainers.with_jobs:
                self.trainers.settle()
            if self._jobs.refusal is not None:
                self._go_on_draining()
            self._failures = 0
        except Exception:
            self._failures += 1
            is_lone = self.engine.device.fails_alike  # several ranks cannot recover in step
            if self._failures > _RETRIES or self.engine.is_broken or not is_lone:
                raise
            _LOG.exception("a round of the engine's thread failed; it goes on with the next")

    def _run_calls(self) -> None:
        engine = self.engine
        waits = not self._failures  # else a step delivers what the failed round left
        try:
            if waits and engine.is_idle:
                self._next_call(None).run()
            elif waits and self._rests:
                self._next_call(max(0.0, self._paused_until - time.monotonic())).run()
            elif waits and not engine.worked:
                self._next_call(_BLOCKED_S).run()
            until = time.monotonic() + self._calls_s
            while self._rests or time.monotonic() < until:
                self._calls.get(block=False).run()
        except Empty:
            return

    def _next_call(self, timeout_s: float | None) -> Call:
        """Wait for a call. Empty: no call arrived within the timeout."""
        if self._leader is None:
            return self._calls.get(timeout=timeout_s)
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            try:
                return self._calls.get(timeout=max(0.0, min(BEAT_S, left_s)))
            except Empty:
                if left_s < BEAT_S:
                    raise
                self._leader.beat()

    @property
    def _rests(self) -> bool:
        """True while the engine is idle or paused."""
        return self.engine.is_idle or time.monotonic() < self._paused_until

    @property
    def _calls_s(self) -> float:
        """Time limit of calls before the next step."""
        is_shared = self.engine.scheduler.policy.is_shared
        return min(_CALLS_S, _CALLS_SHARE * self._latest_step_s) if is_shared else _CALLS_S

    def _submit(self, request: Request, submitted_s: float) -> str:
        if self._leader is None:
            return self.engine.submit(request, submitted_s)
        with self.asked(self._leader.submit_command, request, submitted_s):
            return self.engine.submit(request, submitted_s)

    def _step(self) -> None:
        began = self._step_began = time.monotonic()
        if self._leader is None:
            chunks = self.engine.step()
        else:
            with self.asked(Step):
                chunks = self.engine.step()
        self._latest_step_s = time.monotonic() - began
        self._step_began = None
        self._streams.made += chunks  # before any call that may fail
        self._streams.add_made(self.watcher)
        if not self._runs_ahead:
            self._deliver()

    @property
    def _runs_ahead(self) -> bool:
        """True if the next step starts immediately on a device that runs in parallel.

        Chunks are then delivered during that step; if a step is already running, immediately.
        """
        engine = self.engine
        is_next = engine.worked and not (engine.is_idle or self._closing)
        return is_next and engine.device.side is not None and not engine.is_ahead

    def _deliver(self) -> None:
        self._streams.deliver(self.watcher)


_MADE: WeakSet[AsyncEngine] = WeakSet()


@atexit.register
def _close_all() -> None:
    """End all engine threads at exit: a thread inside a kernel would abort the process."""
    for engine in list(_MADE):
        engine._close(_EXIT_S)


def _forget_all() -> None:
    for engine in list(_MADE):
        engine._forget()


os.register_at_fork(after_in_child=_forget_all)

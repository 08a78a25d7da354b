"""The async engine: an engine on a thread of its own, with streams of requests and awaitable jobs.

    with executor.engine(limits).start() as engine:
        stream = engine.submit("def main(", adapter="sql", max_new_tokens=64)
        job = engine.finetune("train.jsonl", "mine", peft="lora")
        async for chunk in stream: …
        result = await job.result()

Only this thread touches the engine. It sleeps while there is nothing to do, and ends every stream
and job when it ends itself. Calls of others take at most a millisecond between two steps that
serve, and 3 % of a step's time where several tenants are served; the rest of them wait for the next
steps. On a GPU the chunks of a step are delivered while the next step runs.

The thread does not keep the process alive: where the process ends, the thread ends after its step,
and a fork, which has no such thread, raises an error. While the thread runs, Python's threads take
turns every 20 µs and not every 5 ms: each operation of a step gives the interpreter's lock away,
and gets it back after a turn of another thread.

Over ranks all of them have such an engine; rank 0 takes the calls (`replicas.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
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


class AsyncEngine:
    """Takes requests, jobs and trainers from any thread; a context manager, also an async one.

    Attributes:
        engine: the engine, which nobody else may call.
        state: the model's state.
        device: the device of its steps.
        watcher: called on the thread, with the wakes that are sent after it, where the engine's
            numbers may have changed: once a step is planned, at its end and after calls; None for
            nobody.
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
            seat: the place of this rank among several; None for one rank.
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
        # What is refused is not looked at: a flood takes as little of Python's lock as it can.
        refused = self._streams.refused(tenant) if isinstance(tenant, str) else None
        return refused or self.submit_request(make_request(self.state, prompt, adapter, fields))

    def submit_request(self, request: Request, make: StreamMaker = Stream) -> Stream:
        """Submit a request that `Executor.request` made.

        Args:
            make: makes its stream, of a function that cancels it and the request's id.
        Raises:
            EngineError: the thread has ended, or takes no requests any more.
        """
        self.check_open()
        return self._streams.submit(request, make)

    def stream_all(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests; returns their chunks, those of the first request first.

        Two batches of them are in the engine at once, so that any number fits into its queue.

        Raises:
            EngineError: the thread has ended, or this is that thread, which cannot wait for itself.
        """
        self._check_takes()
        if current_thread() is self._thread:
            raise EngineError(
                "a callback of the engine waits for the engine; submit a request there"
            )
        most = 2 * self.engine.scheduler.limits.running
        return in_order(requests, self.submit_request, most)

    def cancel(self, request_id: str) -> None:
        """End a request, from the next step on; nothing happens where there is none of that id."""
        self.call(lambda: self._streams.cancel(request_id))

    # ------------------------------------------------------------------------------- jobs

    @takes(JobArguments, FinetuneError)
    def finetune(self, arguments: JobArguments) -> RunningJob:
        """Train an adapter beside what is served; errors of the data are raised by the result.

        Raises:
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        return self._jobs.begin(arguments)

    def jobs(self) -> list[JobStatus]:
        """Return the jobs as they came, and how far each is; the last 64 of those that are over."""
        return [running.status for running in list(self._jobs.listed)]

    @takes(TrainerArguments, FinetuneError)
    def trainer(self, arguments: TrainerArguments) -> AsyncTrainer:
        """Make a trainer: an adapter that is trained command by command, beside what is served.

        It returns at once; errors of the recipe are raised by `created`, and by every call.

        Raises:
            AdapterConflictError: something trains an adapter of that name.
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        return self.begin_trainer(arguments)

    def begin_trainer(self, arguments: TrainerArguments) -> AsyncTrainer:
        """Do as `trainer` does, with arguments that are one object."""
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
        """Load an adapter while steps go on; it is read, and a program for it compiled, meanwhile.

        What is asked of one name is done in the order of asking. With `replace`, requests that come
        before the new version is there are answered by the old one, to their ends.

        Returns:
            The adapter, once requests may name it, or an error: those of `Executor.add_adapter`,
                and EngineError.
        """
        self.check_open()
        free = partial(self.state.check_free, name, replace=replace)
        check = partial(free, expected_version=expected_version)
        return self._loads.add(name, path_or_config, seed, check)

    def remove_adapter(self, name: str) -> Future[None]:
        """Forget an adapter between two steps; requests that have it go on with it.

        Returns:
            What is done once requests cannot name it, and what was asked of the name before is
                done, or an error: AdapterError where there is none of that name, or a job trains
                it; EngineError.
        """
        self._check_takes()
        return self._loads.remove(name)

    def _remove_adapter(self, name: str) -> None:
        with self.asked(RemoveAdapter, name):
            self.state.remove_adapter(name)

    def adapters(self) -> list[AdapterStatus]:
        """Return the adapters that requests may name; does not wait for a step."""
        return adapters_of(self.engine, self.state)

    def most_tokens(self, adapter: Adapter | None) -> int:
        """Return the most tokens of a prompt and its output that there are pages for."""
        return most_tokens(self.engine, adapter)

    # ------------------------------------------------------------------------------- status

    def running(self) -> list[RunningStatus]:
        """Return the requests that run, as they were admitted; does not wait for a step."""
        return running_of(self.engine)

    def numbers(self) -> EngineNumbers:
        """Return the present numbers and the totals since the start; does not wait for a step."""
        return numbers_of(self.engine)

    def health(self) -> Health:
        """Return whether the thread runs, and takes requests; does not wait for a step."""
        if self.ended is not None:
            return Health(EngineState.ENDED, str(self.ended), None)
        state = EngineState.RUNNING if self._refusal is None else EngineState.DRAINING
        began = self._step_began
        return Health(state, None, None if began is None else time.monotonic() - began)

    @property
    def ended(self) -> EngineError | None:
        """The error that is raised after the end; None before."""
        return self._calls.ended

    # ------------------------------------------------------------------------------- calls

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps; returns its result, an EngineError after the end."""
        self._check_takes()
        return self._calls.call(act)

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a function between two steps, and wait for it; on the engine's own thread now.

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
        """Return what takes the work of guests, which runs in the time that steps leave."""
        if self._seat is not None:
            raise UnsupportedError(
                f"the engine of {self._seat.size} ranks runs no products of clients; use one rank, "
                "or pcg serve-base --tp"
            )
        guests = GuestWork(self.call, lambda: self.engine.is_idle, self._is_called)
        self.engine.parts.guests = guests
        return guests

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

    def check_open(self) -> None:
        """Raise an EngineError if no new work is taken."""
        self._check_takes()
        error = self.ended or self._refusal
        if error is not None:
            raise error

    def _check_takes(self) -> None:
        """Raise an EngineError on a rank that follows."""
        if self._seat is not None:
            self._seat.check_takes(self.ended)

    def _is_called(self) -> bool:
        is_called = self._calls.qsize() > 0
        return is_called if self._seat is None else self._seat.is_called(is_called)

    # ------------------------------------------------------------------------------- draining

    def drain(self, timeout_s: float | None = None) -> Future[None]:
        """End the work that is there, and take nothing new: that is refused by a DrainingError.

        Requests run to their ends. A job ends after its step, as if by Ctrl-C: with a checkpoint if
        it has a `checkpoint_dir`, and by a `FinetuneInterrupted` that says how to resume. The
        thread goes on, so that status can be read, until `close`.

        Args:
            timeout_s: time after which what is left is given up, seconds; None for never.
        Returns:
            What is done once nothing is left.
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
        """Give up what is left once the time is out, and tell when nothing is."""
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
        """Wait until the engine has ended, and return why."""
        self._over.wait()
        if self._seat is None:
            self._thread.join()
        assert self.ended is not None
        return self.ended

    def follow(self) -> None:
        """Wait on a rank that follows until rank 0 closes its engine.

        Raises:
            EngineError: it ended by an error, as where a rank is lost; the engine is over here.
        """
        error = self.join()
        if error.__cause__ is not None:
            raise error

    def close(self) -> None:
        """End the thread after its step, and cancel what is left; on other ranks follow rank 0."""
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
        """End in a fork, where another thread may have held the lock."""
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
        """End although the thread may wait for a rank that is gone."""
        assert self._seat is not None
        error = EngineError(f"the engine over {self._seat.size} ranks ended: {word}")
        error.__cause__ = ParallelError(word)
        if self._end(error):
            self._seat.leave(str(error))
            self._finish()

    def _end(self, error: EngineError) -> bool:
        """Refuse further calls, and fail all that still waits; True for the first end."""
        with self._calls.lock:
            if self.ended is not None:
                return False
            self._calls.ended = error
            self.state.engine_thread = None
        self._streams.fail_all(error)
        self.trainers.fail_all(error)
        self._jobs.fail_all(error)
        self.preparation.close()  # which cancels what is read, and its end is known by now
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
        """Have all ranks do what is done within the `with`, by the command of these fields."""
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
        """Run calls and steps until the end; returns why they ended."""
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, interval_s))
        ended = EngineError("the engine was closed; start it again")
        self.engine.meanwhile = self._deliver
        try:
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
        sys.setswitchinterval(interval_s)
        return ended

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
            if self._jobs.running:
                self._jobs.settle()
            if self.trainers.with_jobs:
                self.trainers.settle()
            if self._jobs.refusal is not None:
                self._go_on_draining()
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
                self._calls.get(block=False).run()
        except Empty:
            return

    def _next_call(self, timeout_s: float | None) -> Call:
        """Wait for a call. Empty: there is none after so long."""
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
        """True while no step is to be run."""
        return self.engine.is_idle or time.monotonic() < self._paused_until

    @property
    def _calls_s(self) -> float:
        """Return the time that calls have before the next step."""
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
        self._streams.add(chunks, self.watcher)
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
        self._streams.deliver(self.watcher)


_MADE: WeakSet[AsyncEngine] = WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads with the process: a thread within a kernel would abort it."""
    for engine in list(_MADE):
        engine._close(_EXIT_S)


def _forget_all() -> None:
    for engine in list(_MADE):
        engine._forget()


os.register_at_fork(after_in_child=_forget_all)

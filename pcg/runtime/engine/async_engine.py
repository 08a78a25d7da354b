"""The async engine: an engine on a thread of its own, with streams of requests and awaitable jobs.

    with executor.engine(limits).start() as engine:
        stream = engine.submit("def main(", adapter="sql", max_new_tokens=64)
        job = engine.finetune("train.jsonl", "mine", peft="lora")
        async for chunk in stream: …
        result = await job.result()

A job's data is read and its program compiled beside the steps (`pcg.runtime.engine.preparation`),
and every job ends when the engine's thread does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from threading import current_thread
from typing import Any, TypeVar, Unpack

from pcg.errors import (
    AdapterConflictError,
    DrainingError,
    EngineError,
    FinetuneError,
    PcgError,
    as_pcg_error,
)
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.keywords import takes
from pcg.peft.adapter import Adapter
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.engine.guest_work import GuestWork
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.preparation import Preparation
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.engine.trainers.trainer_thread import PrepareTrainer, TrainerThread
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import (
    AdapterStatus,
    EngineNumbers,
    EngineState,
    Health,
    JobStatus,
    RunningStatus,
)
from pcg.runtime.model.adapter_loads import Loads
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.request import Chunk, Request, RequestFields, make_request
from pcg.runtime.requests.stream import Stream, in_order
from pcg.runtime.training.options import JobArguments

Result = TypeVar("Result")

_KEPT_JOBS = 64
"""The number of jobs that are over and can still be listed."""


class AsyncEngine(TrainerThread):
    """Takes requests, jobs and trainers from any thread; a context manager, also an async one."""

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        prepare_trainer: PrepareTrainer,
        data_limits: DataLimits,
    ) -> None:
        super().__init__(engine, state, prepare_trainer, Preparation(state, data_limits))
        self._prepare_job = prepare_job
        self._jobs: list[RunningJob] = []
        self._reserved: dict[str, RunningJob] = {}
        self._listed: list[RunningJob] = []
        self._drained: Future[None] = Future()
        self._drained.set_running_or_notify_cancel()
        self._drain_until = math.inf
        self._refuses = False
        self._loads = self._made_loads()
        state.engine_thread = self
        self._thread.start()

    def _made_loads(self) -> Loads:
        return Loads(
            self.state, self._preparation, self.call, self._check_open, self._check_unreserved
        )

    # ------------------------------------------------------------------------------- for any thread

    def submit(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Stream:
        """Submit a prompt; see `Executor.request`. EngineError: the thread has ended."""
        self._check_open()
        tenant = fields.get("tenant", "")
        # What is refused is not looked at: a flood takes as little of Python's lock as it can.
        refused = self._refused(tenant) if isinstance(tenant, str) else None
        return refused or self.submit_request(make_request(self.state, prompt, adapter, fields))

    @takes(JobArguments, FinetuneError)
    def finetune(self, given: JobArguments) -> RunningJob:
        """Train an adapter beside what is served; errors of the data are raised by the result.

        Raises:
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        self._check_open()
        running = RunningJob(given.adapter, self.engine, self.call)
        self._list(running)
        reserved = self.call(functools.partial(self._reserve, running))

        def read(reserved: Future[None]) -> None:
            if not _pass_error(running, reserved):
                examples = self._preparation.read(given, running.cancelling)
                compile_ = functools.partial(self._compile, running)
                examples.add_done_callback(self._failing(running, compile_))

        reserved.add_done_callback(self._failing(running, read))
        return running

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
        self._check_open()
        free = functools.partial(self.state.check_free, name, replace=replace)
        check = functools.partial(free, expected_version=expected_version)
        return self._loads.add(name, path_or_config, seed, check)

    def stream_all(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests; returns their chunks, those of the first request first.

        Two batches of them are in the engine at once, so that any number fits into its queue.

        Raises:
            EngineError: the thread has ended, or this is that thread, which cannot wait for itself.
        """
        if current_thread() is self._thread:
            raise EngineError(
                "a callback of the engine waits for the engine; submit a request there"
            )
        most = 2 * self.engine.scheduler.limits.running
        return in_order(requests, self.submit_request, most)

    def remove_adapter(self, name: str) -> Future[None]:
        """Forget an adapter between two steps; requests that have it go on with it.

        Returns:
            What is done once requests cannot name it, and what was asked of the name before is
                done, or an error: AdapterError where there is none of that name, or a job trains
                it; EngineError.
        """
        return self._loads.remove(name)

    def adapters(self) -> list[AdapterStatus]:
        """Return the adapters that requests may name; does not wait for a step."""
        use_of, state = self.engine.scheduler.adapters.use_of, self.state
        found = []
        for name, adapter in sorted(state.adapters.items()):
            pages, running = use_of(adapter)
            version = state.versions.of(adapter)
            assert version is not None
            found.append(
                AdapterStatus(
                    name,
                    version,
                    adapter.recipe.method,
                    adapter.size_bytes,
                    running,
                    pages,
                    state.is_trained(name),
                )
            )
        return found

    def running(self) -> list[RunningStatus]:
        """Return the requests that run, as they were admitted; does not wait for a step."""
        now_s = self.engine.clock.here_s()
        return [
            RunningStatus(
                one.id,
                one.request.tenant,
                None if one.request.adapter is None else one.request.adapter.name,
                len(one.request.prompt_ids),
                len(one.generated),
                now_s - one.times.submitted_s,
            )
            for one in list(self.engine.scheduler.running)
        ]

    def jobs(self) -> list[JobStatus]:
        """Return the jobs as they came, and how far each is; the last 64 of those that are over."""
        return [running.status for running in list(self._listed)]

    def _list(self, running: RunningJob) -> None:
        with self._lock:
            for one in [one for one in self._listed if one.is_over][:-_KEPT_JOBS]:
                self._listed.remove(one)
            self._listed.append(running)

    def host(self) -> GuestWork:
        """Return what takes the work of guests, which runs in the time that steps leave."""
        guests = GuestWork(self.call, lambda: self.engine.is_idle, self._is_called)
        self.engine.parts.guests = guests
        return guests

    def most_tokens(self, adapter: Adapter | None) -> int:
        """Return the most tokens of a prompt and its output that there are pages for."""
        scheduler = self.engine.scheduler
        reserved = self.engine.jobs.pages.most if self.engine.jobs else 0
        pages = scheduler.pool.size - reserved - scheduler.adapters.pages_of(adapter)
        return pages * PAGE_TOKENS + 1  # the last token is never cached

    def numbers(self) -> EngineNumbers:
        """Return what is there now, and what was done since the start; does not wait for a step."""
        scheduler = self.engine.scheduler
        return EngineNumbers(
            waiting=len(scheduler.waiting),
            preparing=len(scheduler.preparing),
            running=len(scheduler.running),
            waiting_tokens=scheduler.backlog.tokens,
            jobs=Counter(job.state for job in list(self.engine.jobs)),
            pages=scheduler.pool.size,
            free_pages=scheduler.pool.free + scheduler.adapters.idle_pages,
            adapters=len(scheduler.adapters),
            shares_prefixes=scheduler.prefixes is not None,
            late=self.engine.device.late,
            reads=dict(self.engine.reads),
            totals=self.engine.totals,
            copies_bytes=self.engine.device.copies_bytes,
        )

    def health(self) -> Health:
        """Return whether the thread runs, and takes requests; does not wait for a step."""
        if self.ended is not None:
            return Health(EngineState.ENDED, str(self.ended), None)
        state = EngineState.RUNNING if self._refusal is None else EngineState.DRAINING
        return Health(state, None, self.step_s)

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
        if timeout_s is not None and not timeout_s > 0:
            raise EngineError(f"timeout_s={timeout_s!r}; use seconds above 0, or None")
        if self._refusal is None:
            self._refusal = DrainingError("the engine ends its work and takes nothing new")
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.call(functools.partial(self._drain, until))
        return self._drained

    def _drain(self, until: float) -> None:
        self._drain_until = min(self._drain_until, until)
        self._paused_until = -math.inf
        if not self._refuses:
            self._refuses = True
            for running in self._jobs:
                running.interrupt()
            for running in self._reserved.values():
                running.cancel()

    def _go_on_draining(self) -> None:
        """Give up what is left once the time is out, and tell when nothing is."""
        is_late = time.monotonic() > self._drain_until
        if is_late:
            super()._cancel_all()
            for stream in self._streams.values():
                assert stream.request_id is not None
                self.engine.cancel(stream.request_id, Kind.TIMED_OUT)
        if is_late or self.engine.is_idle:
            for job in list(self.engine.jobs):
                self.engine.cancel_job(job.name)
        is_left = self._streams or self._jobs or self._reserved or len(self._arrivals)
        if not (is_left or self.trains or self._drained.done()):
            self._drained.set_result(None)

    def _compile(self, running: RunningJob, read: Future[JobArguments]) -> None:
        """Have a job made of its examples, on the thread that compiles."""
        if read.exception() is not None:
            self.call(functools.partial(self._release, running))  # its name is free once it is told
            _pass_error(running, read)
            return
        with contextlib.suppress(EngineError):  # closed meanwhile, and the job is cancelled
            self.compile_aside(functools.partial(self._prepare, running, read.result()))

    def _prepare(self, running: RunningJob, given: JobArguments) -> None:
        """Make a job ready, on the thread that compiles."""
        try:
            self._check_open()
            running.cancelling.check()
            job = self._prepare_job(given)
        except Exception as error:  # the caller's
            self.call(functools.partial(self._release, running))
            running.fail(error)
            return
        begun = self.call(functools.partial(self._begin_job, running, job))

        def settle(begun: Future[None]) -> None:
            if _pass_error(running, begun):
                self.engine.drop_job(job)

        begun.add_done_callback(self._failing(running, settle))

    def _failing(
        self, running: RunningJob, act: Callable[[Future[Any]], None]
    ) -> Callable[[Future[Any]], None]:
        """Return a callback whose error fails a job: a future would keep the error to itself."""

        def guarded(done: Future[Any]) -> None:
            try:
                act(done)
            except Exception as error:
                self.call(functools.partial(self._release, running))
                running.fail(as_pcg_error(error, f"job {running.name!r}", FinetuneError))

        return guarded

    # ------------------------------------------------------------------------------- the thread

    def _reserve(self, running: RunningJob) -> None:
        """Reserve a name for a job, so that it starts from the result of the job before it."""
        name = running.name
        if self._refuses and self._refusal is not None:
            raise self._refusal
        self.engine.jobs.check_free(name)
        if name in self._reserved:
            raise PcgError(f"there is a job {name!r} already; cancel it, or wait for its end")
        self._reserved[name] = running

    def _check_unreserved(self, name: str) -> None:
        if name in self._reserved:
            raise AdapterConflictError(
                f"a job that trains adapter {name!r} is being prepared; cancel it, or wait for it"
            )

    def _release(self, running: RunningJob) -> None:
        """Release the name of a job that does not begin."""
        if self._reserved.get(running.name) is running:
            del self._reserved[running.name]

    def _begin_job(self, running: RunningJob, job: Job) -> None:
        self._release(running)
        running.cancelling.check()
        running.begin(self.engine.add_job(job))
        self._jobs.append(running)

    def _settle(self) -> None:
        super()._settle()
        self._jobs = [running for running in self._jobs if not running.settle()]
        if self._refuses:
            self._go_on_draining()

    def _cancel_all(self) -> None:
        super()._cancel_all()
        for running in self._jobs:
            self.engine.cancel_job(running.name)
        self._settle()
        for name, running in self._reserved.items():
            running.fail(FinetuneError(f"job {name!r} was cancelled"))

    def _fail_all(self, error: EngineError) -> None:
        self.state.engine_thread = None
        super()._fail_all(error)
        for running in (*self._jobs, *self._reserved.values()):
            running.fail(error)
        self._preparation.close()  # which cancels what is read, and its end is known by now
        for job in self.engine.jobs:
            job.cancel()
        if not self._drained.done():
            self._drained.set_result(None)


def _pass_error(running: RunningJob, done: Future[Any]) -> bool:
    """Fail a job that could not begin; returns True if it could not."""
    error = done.exception()
    if error is not None:
        running.fail(error)
    return error is not None

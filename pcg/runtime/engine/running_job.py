"""Finetuning jobs of an engine on a thread: their handles, from the call to their end.

A job reserves its name, has its data read, is compiled, and is then a job of the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from threading import Lock
from typing import Any, Literal, TypeAlias

from pcg.errors import (
    AdapterConflictError,
    EngineError,
    FinetuneError,
    FinetuneInterrupted,
    PcgError,
    as_pcg_error,
)
from pcg.runtime.data.tokenizing import Cancelling
from pcg.runtime.engine.preparation import PreparingThread
from pcg.runtime.engine.rank_commands import AddJob, ChangeJob, DropJob
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.metrics.status import JobState, JobStatus
from pcg.runtime.training.options import FinetuneResult, JobArguments

Change: TypeAlias = Literal["pause", "resume", "cancel", "interrupt"]

_KEPT_JOBS = 64
"""The number of jobs that are over and can still be listed."""


class RunningJob:
    """A job that can be awaited, paused, resumed and cancelled, until it is over."""

    def __init__(self, name: str, thread: PreparingThread) -> None:
        self.name = name
        self.cancelling = Cancelling(name)
        self._thread = thread
        self._job: Job | None = None
        self._early: list[Change] = []
        self._end: Future[FinetuneResult] = Future()
        self._end.set_running_or_notify_cancel()  # cancelling a wait must not cancel it

    @property
    def status(self) -> JobStatus:
        """The steps that it has done, and how it goes on or ended."""
        job, record = self._job, None if self._job is None else self._job.record
        error = self._end.exception() if self._end.done() else None
        checkpoint = None if record is None else record.checkpoint
        if isinstance(error, FinetuneInterrupted) and error.checkpoint is not None:
            checkpoint = error.checkpoint
        status = JobStatus(
            self.name,
            self.state,
            step=0 if record is None else record.step,
            total_steps=None if record is None else record.total_steps,
            loss=None if record is None else record.loss,
            checkpoint=checkpoint,
            error=None if error is None else str(error),
        )
        if job is None:
            return status
        if job.refusal is not None and not job.is_over:
            waits = job.refusal.described(self._thread.engine.scheduler.limits)
            status = dataclasses.replace(status, waits=waits)
        if job.began_s is None:
            return status
        until_s = job.latest_s if job.is_over else self._thread.engine.clock.latest_s()
        lasted_s = max(until_s - job.began_s, 1e-9)
        status = dataclasses.replace(status, time_share=min(job.spent_s / lasted_s, 1.0))
        if record is None:
            return status
        left_s = (record.total_steps - record.step) * lasted_s / job.steps
        return dataclasses.replace(
            status,
            tokens_per_second=record.tokens_per_second,
            remaining_s=None if job.is_over else left_s,
        )

    @property
    def state(self) -> JobState:
        """The job's state; a job that could not begin has failed, or was cancelled."""
        if self._job is not None:
            return self._job.state
        if not self.is_over:
            return JobState.QUEUED
        return JobState.CANCELLED if self.cancelling.is_cancelled else JobState.FAILED

    @property
    def is_over(self) -> bool:
        return self._end.done()

    async def result(self) -> FinetuneResult:
        """Wait for the job's result, or its PcgError; FinetuneError if it was cancelled."""
        return await asyncio.wrap_future(self._end)

    def wait(self, timeout_s: float | None = None) -> FinetuneResult:
        """Wait for the result in a thread. TimeoutError: it is not over after so long."""
        return self._end.result(timeout_s)

    def on_end(self, act: Callable[[Future[FinetuneResult]], None]) -> None:
        """Call a function with the result, or the error, once the job is over; it must not wait."""
        self._end.add_done_callback(act)

    def pause(self) -> None:
        self._change("pause")

    def resume(self) -> None:
        self._change("resume")

    def cancel(self) -> None:
        """End the job now, also while it is prepared; its adapter is as it was last published."""
        self.cancelling.cancel()
        self._change("cancel")

    def interrupt(self) -> None:
        """End the job after its step, with a checkpoint if it has a `checkpoint_dir`."""
        self._change("interrupt")

    def _change(self, change: Change) -> None:
        def act() -> None:
            if self._job is None and self.cancelling.is_cancelled:
                self.fail(self.cancelling.error)
            elif self._job is None:
                self._early.append(change)
            elif not self._job.is_over:
                self.change(change)

        self._thread.call(act)

    # ------------------------------------------------------------------- the engine's thread

    def change(self, change: Change) -> None:
        with self._thread.asked(ChangeJob, self.name, change):
            getattr(self._thread.engine, f"{change}_job")(self.name)

    def begin(self, job: Job) -> None:
        """Note that the engine runs the job, and apply earlier changes."""
        self._job = job
        for change in self._early:
            if not job.is_over:
                self.change(change)

    def settle(self) -> bool:
        """Pass the result on if the job is over; returns True then."""
        job = self._job
        assert job is not None
        if not job.is_over or self._end.done():
            return job.is_over
        if job.error is not None:
            self._end.set_exception(job.error)
        elif job.state is JobState.CANCELLED:
            self._end.set_exception(self.cancelling.error)
        else:
            self._end.set_result(job.result)
        return True

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it is over; on any thread."""
        with contextlib.suppress(InvalidStateError):
            self._end.set_exception(error)


class RunningJobs:
    """The jobs of an engine on a thread, and their preparation on other threads.

    Attributes:
        running: the jobs that the engine runs.
        reserved: the jobs that are prepared, by name.
        listed: the jobs as they came; of those that are over the last 64.
        refusal: the error of later jobs, once none is taken any more.
    """

    def __init__(self, thread: PreparingThread, prepare: Callable[[JobArguments], Job]) -> None:
        self.running: list[RunningJob] = []
        self.reserved: dict[str, RunningJob] = {}
        self.listed: list[RunningJob] = []
        self.refusal: EngineError | None = None
        self._thread = thread
        self._prepare_job = prepare
        self._lock = Lock()

    def begin(self, arguments: JobArguments) -> RunningJob:
        """Have a job prepared and run, from any thread. EngineError: no new work is taken."""
        thread = self._thread
        thread.check_open()
        running = RunningJob(arguments.adapter, thread)
        with self._lock:
            for over in [job for job in self.listed if job.is_over][:-_KEPT_JOBS]:
                self.listed.remove(over)
            self.listed.append(running)

        def read(reserved: Future[None]) -> None:
            if not _pass_error(running, reserved):
                examples = thread.preparation.read(arguments, running.cancelling)
                examples.add_done_callback(
                    self._failing(running, functools.partial(self._compile, running))
                )

        reserved = thread.call(functools.partial(self._reserve, running))
        reserved.add_done_callback(self._failing(running, read))
        return running

    def _compile(self, running: RunningJob, read: Future[JobArguments]) -> None:
        """Have a job made of its examples, on the thread that compiles."""
        if read.exception() is not None:
            self._release_later(running)  # its name is free once its error is known
            _pass_error(running, read)
            return
        with contextlib.suppress(EngineError):  # closed meanwhile, and the job is cancelled
            self._thread.compile_aside(functools.partial(self._prepare, running, read.result()))

    def _prepare(self, running: RunningJob, arguments: JobArguments) -> None:
        """Make a job ready, on the thread that compiles."""
        try:
            self._thread.check_open()
            running.cancelling.check()
            job = self._prepare_job(arguments)
        except Exception as error:  # the caller's
            self._release_later(running)
            running.fail(error)
            return

        def settle(begun: Future[None]) -> None:
            if _pass_error(running, begun):
                with self._thread.asked(DropJob, job.name):
                    self._thread.engine.drop_job(job)

        begun = self._thread.call(functools.partial(self._begin_job, running, job))
        begun.add_done_callback(self._failing(running, settle))

    def _failing(
        self, running: RunningJob, act: Callable[[Future[Any]], None]
    ) -> Callable[[Future[Any]], None]:
        """Return a callback whose error fails a job: a future would keep the error to itself."""

        def guarded(future: Future[Any]) -> None:
            try:
                act(future)
            except Exception as error:
                self._release_later(running)
                running.fail(as_pcg_error(error, f"job {running.name!r}", FinetuneError))

        return guarded

    # ------------------------------------------------------------------- the engine's thread

    def _reserve(self, running: RunningJob) -> None:
        """Reserve a name for a job, so that it starts from the result of the job before it."""
        name = running.name
        if self.refusal is not None:
            raise self.refusal
        self._thread.engine.jobs.check_free(name)
        if name in self.reserved:
            raise PcgError(f"there is a job {name!r} already; cancel it, or wait for its end")
        self.reserved[name] = running

    def check_unreserved(self, name: str) -> None:
        """Raise an AdapterConflictError while a job that trains the name is prepared."""
        if name in self.reserved:
            raise AdapterConflictError(
                f"a job that trains adapter {name!r} is being prepared; cancel it, or wait for it"
            )

    def _release_later(self, running: RunningJob) -> None:
        self._thread.call(functools.partial(self._release, running))

    def _release(self, running: RunningJob) -> None:
        """Release the name of a job that does not begin."""
        if self.reserved.get(running.name) is running:
            del self.reserved[running.name]

    def _begin_job(self, running: RunningJob, job: Job) -> None:
        self._release(running)
        running.cancelling.check()
        with self._thread.asked(AddJob, job.name):
            self._thread.engine.add_job(job)
        running.begin(job)
        self.running.append(running)

    def settle(self) -> None:
        """Pass on the results of jobs that are over."""
        self.running = [job for job in self.running if not job.settle()]

    def refuse(self, refusal: EngineError) -> None:
        """Take no further jobs, interrupt those that run and cancel those that are prepared."""
        self.refusal = refusal
        for job in self.running:
            job.interrupt()
        for job in self.reserved.values():
            job.cancel()

    def cancel_all(self) -> None:
        for job in self.running:
            job.change("cancel")
        self.settle()
        for name, job in self.reserved.items():
            job.fail(FinetuneError(f"job {name!r} was cancelled"))

    def fail_all(self, error: EngineError) -> None:
        """End the handles of all jobs, once the thread has ended."""
        for job in (*self.running, *self.reserved.values()):
            job.fail(error)


def _pass_error(running: RunningJob, future: Future[Any]) -> bool:
    """Fail a job that could not begin; returns True if it could not."""
    error = future.exception()
    if error is not None:
        running.fail(error)
    return error is not None

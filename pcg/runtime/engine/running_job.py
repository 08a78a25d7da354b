"""Finetuning jobs of an async engine: their handles, from submission to the end.

A job reserves its name, reads its data and compiles its program; then the engine's loop runs it.
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
from pcg.pages import fact_table
from pcg.runtime.data.tokenizing import Cancelling
from pcg.runtime.engine.preparation import PreparingThread
from pcg.runtime.engine.rank_commands import AddJob, ChangeJob, DropJob
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.metrics.status import JobState, JobStatus
from pcg.runtime.training.options import FinetuneResult, JobArguments

Change: TypeAlias = Literal["pause", "resume", "cancel", "interrupt"]

_KEPT_JOBS = 64
"""The number of ended jobs that stay listed."""


class RunningJob:
    """The handle of a job, which can be awaited, paused, resumed and cancelled."""

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
        """The job's progress, state, speed and error."""
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

    def _repr_html_(self) -> str:
        """Return the job's status as a table, which notebooks show."""
        status = dataclasses.asdict(self.status)
        facts = {name: value for name, value in status.items() if value is not None}
        return fact_table(f"Job {facts.pop('name')}", facts)

    @property
    def state(self) -> JobState:
        """The job's state; FAILED or CANCELLED for a job that could not start."""
        if self._job is not None:
            return self._job.state
        if not self.is_over:
            return JobState.QUEUED
        return JobState.CANCELLED if self.cancelling.is_cancelled else JobState.FAILED

    @property
    def is_over(self) -> bool:
        return self._end.done()

    async def result(self) -> FinetuneResult:
        """Wait for the job's result. PcgError: the job failed, or was cancelled."""
        return await asyncio.wrap_future(self._end)

    def wait(self, timeout_s: float | None = None) -> FinetuneResult:
        """Block until the result is available. TimeoutError: the timeout has passed."""
        return self._end.result(timeout_s)

    def on_end(self, act: Callable[[Future[FinetuneResult]], None]) -> None:
        """Call a function, which must not block, with the job's future once the job is over."""
        self._end.add_done_callback(act)

    def pause(self) -> None:
        self._change("pause")

    def resume(self) -> None:
        self._change("resume")

    def cancel(self) -> None:
        """Cancel the job, also during preparation; the last published adapter version remains."""
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
        """Attach the engine's job, and apply changes that were requested earlier."""
        self._job = job
        for change in self._early:
            if not job.is_over:
                self.change(change)

    def settle(self) -> bool:
        """Set the result if the job is over; return True if so."""
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
        """Set an error unless the job is over; for any thread."""
        with contextlib.suppress(InvalidStateError):
            self._end.set_exception(error)


class RunningJobs:
    """The jobs of an async engine, and their preparation on other threads.

    Attributes:
        running: jobs that the engine runs.
        reserved: jobs under preparation, by name.
        listed: jobs in order of submission, with the last 64 ended jobs.
        refusal: the error that refuses new jobs; None while jobs are accepted.
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
        """Prepare and run a job, from any thread. EngineError: the engine accepts no new work."""
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
        """Create a job from its examples, on the compile thread."""
        if read.exception() is not None:
            self._release_later(running)  # before the caller sees the error
            _pass_error(running, read)
            return
        with contextlib.suppress(EngineError):  # the engine was closed, which cancels the job
            self._thread.compile_aside(functools.partial(self._prepare, running, read.result()))

    def _prepare(self, running: RunningJob, arguments: JobArguments) -> None:
        """Compile a job and add it to the engine; runs on the compile thread."""
        try:
            self._thread.check_open()
            running.cancelling.check()
            job = self._prepare_job(arguments)
        except Exception as error:  # the caller's
            self._release_later(running)
            running.fail(error)
            return

        def settle(begun: Future[None]) -> None:
            if begun.exception() is not None:
                self._release(running)  # before the caller sees the error
                _pass_error(running, begun)
                with self._thread.asked(DropJob, job.name):
                    self._thread.engine.drop_job(job)

        begun = self._thread.call(functools.partial(self._begin_job, running, job))
        begun.add_done_callback(self._failing(running, settle))

    def _failing(
        self, running: RunningJob, act: Callable[[Future[Any]], None]
    ) -> Callable[[Future[Any]], None]:
        """Return a callback that fails the job on an error, which a future would only log."""

        def guarded(future: Future[Any]) -> None:
            try:
                act(future)
            except Exception as error:
                self._release_later(running)
                running.fail(as_pcg_error(error, f"job {running.name!r}", FinetuneError))

        return guarded

    # ------------------------------------------------------------------- the engine's thread

    def _reserve(self, running: RunningJob) -> None:
        """Reserve a job's name, so that the job starts from the result of the previous job."""
        name = running.name
        if self.refusal is not None:
            raise self.refusal
        self._thread.engine.jobs.check_free(name)
        if name in self.reserved:
            raise PcgError(f"there is a job {name!r} already; cancel it, or wait for its end")
        self.reserved[name] = running

    def check_unreserved(self, name: str) -> None:
        """Raise an AdapterConflictError if a job under preparation trains the name."""
        if name in self.reserved:
            raise AdapterConflictError(
                f"a job that trains adapter {name!r} is being prepared; cancel it, or wait for it"
            )

    def _release_later(self, running: RunningJob) -> None:
        self._thread.call(functools.partial(self._release, running))

    def _release(self, running: RunningJob) -> None:
        """Release the name of a job that did not start."""
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
        """Set the results of jobs that are over."""
        self.running = [job for job in self.running if not job.settle()]

    def refuse(self, refusal: EngineError) -> None:
        """Refuse new jobs, interrupt running jobs and cancel jobs under preparation."""
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
        """Fail the handles of all jobs, after the thread has ended."""
        for job in (*self.running, *self.reserved.values()):
            job.fail(error)


def _pass_error(running: RunningJob, future: Future[Any]) -> bool:
    """Pass a future's error to a job; return True if the future has an error."""
    error = future.exception()
    if error is not None:
        running.fail(error)
    return error is not None

"""A running job: the handle of a finetuning job on the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from pcg.errors import FinetuneInterrupted
from pcg.runtime.data.tokenizing import Cancelling
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.metrics.status import JobState, JobStatus
from pcg.runtime.training.options import FinetuneResult


class RunningJob:
    """A job that can be awaited, paused, resumed and cancelled, until it is over."""

    def __init__(
        self, name: str, engine: EngineLoop, call: Callable[[Callable[[], None]], object]
    ) -> None:
        self.name = name
        self.cancelling = Cancelling(name)
        self._engine = engine
        self._call = call
        self._job: Job | None = None
        self._early: list[Callable[[str], None]] = []
        self._end: Future[FinetuneResult] = Future()
        self._end.set_running_or_notify_cancel()  # cancelling a wait must not cancel it

    @property
    def status(self) -> JobStatus:
        """The steps that it has done, and how it goes on or ended."""
        record = None if self._job is None else self._job.record
        error = self._end.exception() if self._end.done() else None
        checkpoint = None if record is None else record.checkpoint
        if isinstance(error, FinetuneInterrupted) and error.checkpoint is not None:
            checkpoint = error.checkpoint
        status = JobStatus(
            self.name,
            self.state,
            0 if record is None else record.step,
            None if record is None else record.total_steps,
            None if record is None else record.loss,
            checkpoint,
            None if error is None else str(error),
        )
        job = self._job
        if job is None:
            return status
        if job.refusal is not None and not job.is_over:
            waits = job.refusal.described(self._engine.scheduler.limits)
            status = dataclasses.replace(status, waits=waits)
        if job.began_s is None:
            return status
        until_s = job.latest_s if job.is_over else self._engine.clock.latest_s()
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
        self._change(self._engine.pause_job)

    def resume(self) -> None:
        self._change(self._engine.resume_job)

    def cancel(self) -> None:
        """End the job now, also while it is prepared; its adapter is as it was last published."""
        self.cancelling.cancel()
        self._change(self._engine.cancel_job)

    def interrupt(self) -> None:
        """End the job after its step, with a checkpoint if it has a `checkpoint_dir`."""
        self._change(self._engine.interrupt_job)

    def _change(self, change: Callable[[str], None]) -> None:
        def act() -> None:
            if self._job is None and self.cancelling.is_cancelled:
                self.fail(self.cancelling.error)
            elif self._job is None:
                self._early.append(change)
            elif not self._job.is_over:
                change(self.name)

        self._call(act)

    # ------------------------------------------------------------------- the engine's thread

    def begin(self, job: Job) -> None:
        """Note that the engine runs the job, and apply earlier changes."""
        self._job = job
        for change in self._early:
            if not job.is_over:
                change(self.name)

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

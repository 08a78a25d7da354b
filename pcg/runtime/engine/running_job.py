"""A finetuning job on the engine's thread, as others see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from pcg.errors import FinetuneError
from pcg.runtime.engine.job import Job, JobState
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.training.result import FinetuneResult


class RunningJob:
    """A job that can be awaited, paused, resumed and cancelled; one that is over stays as it is.

    Attributes:
        name: of the job and its adapter.
    """

    def __init__(
        self, name: str, engine: EngineLoop, ask: Callable[[Callable[[], None]], object]
    ) -> None:
        """Wait to be taken in.

        Args:
            name: of the job.
            engine: that will run it.
            ask: has something done between two of its steps.
        """
        self.name = name
        self._engine = engine
        self._ask = ask
        self._job: Job | None = None
        self._early: list[Callable[[str], None]] = []
        self._end: Future[FinetuneResult] = Future()
        self._end.set_running_or_notify_cancel()  # who stops waiting does not end it

    @property
    def state(self) -> JobState:
        """Where it is; a job that could not begin has failed."""
        if self._job is not None:
            return self._job.state
        return JobState.FAILED if self._end.done() else JobState.QUEUED

    async def result(self) -> FinetuneResult:
        """What it came to, once it is over.

        Raises:
            PcgError: why it failed; FinetuneError where it was cancelled.
        """
        return await asyncio.wrap_future(self._end)

    def wait(self, timeout_s: float | None = None) -> FinetuneResult:
        """The same for threads. TimeoutError: it is not over after so long."""
        return self._end.result(timeout_s)

    def pause(self) -> None:
        """Leave it as it is after its latest unit."""
        self._change(self._engine.pause_job)

    def resume(self) -> None:
        """Go on with it."""
        self._change(self._engine.resume_job)

    def cancel(self) -> None:
        """End it now; its adapter is as it was published last."""
        self._change(self._engine.cancel_job)

    def _change(self, change: Callable[[str], None]) -> None:
        def act() -> None:
            if self._job is None:
                self._early.append(change)
            elif not self._job.is_over:
                change(self.name)

        self._ask(act)

    # ------------------------------------------------------------------- the engine's thread

    def begin(self, job: Job) -> None:
        """The engine has taken it in; what was asked of it before is done now."""
        self._job = job
        for change in self._early:
            if not job.is_over:
                change(self.name)

    def settle(self) -> bool:
        """Whether it is over; hands on what it came to."""
        job = self._job
        assert job is not None
        if not job.is_over:
            return False
        if job.error is not None:
            self._end.set_exception(job.error)
        elif job.state is JobState.CANCELLED:
            self._end.set_exception(FinetuneError(f"job {self.name!r} was cancelled"))
        else:
            self._end.set_result(job.result)
        return True

    def fail(self, error: BaseException) -> None:
        """End by an error, unless it is over."""
        if not self._end.done():
            self._end.set_exception(error)

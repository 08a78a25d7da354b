"""A finetuning job in the engine: where it is, and what it asks for next."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pcg.errors import PcgError
from pcg.runtime.engine.events import Kind
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.training.work_units import Unit, Work


class JobState(StrEnum):
    """Where a job is; OpenAI's words where they have one."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = {
    JobState.SUCCEEDED: Kind.COMPLETED,
    JobState.CANCELLED: Kind.CANCELLED,
    JobState.FAILED: Kind.FAILED,
}


class Job:
    """One job.

    Attributes:
        name: of the job, that of its adapter.
        state: where it is.
        unit: what it asks for; None before it starts and after its end.
        tokens: that it was given, forward and layers backward, by which jobs take turns.
        tables: pages that it holds.
        error: why it failed.
        result: what it came to, where it succeeded.
    """

    def __init__(self, name: str, work: Work[Any]) -> None:
        """Wait to be started.

        Args:
            name: of the job.
            work: its units.
        """
        self.name = name
        self.state = JobState.QUEUED
        self.unit: Unit | None = None
        self.tokens = 0
        self.tables: tuple[PageTable, ...] = ()
        self.error: PcgError | None = None
        self.result: Any = None
        self._work = work

    @property
    def is_over(self) -> bool:
        return self.state in _ENDS

    @property
    def ending(self) -> Kind:
        """What the log says of its end."""
        return _ENDS[self.state]

    def start(self) -> None:
        """Ask for the first unit."""
        self.state = JobState.RUNNING
        self.advance()

    def advance(self) -> None:
        """Go on after the unit that was done: to the next, or to the end."""
        try:
            self.unit = next(self._work)
        except StopIteration as end:
            self.unit, self.result = None, end.value
            self.state = JobState.SUCCEEDED
        except PcgError as error:
            self.fail(error)

    def cancel(self) -> None:
        """End now."""
        self._end(JobState.CANCELLED)

    def fail(self, error: PcgError) -> None:
        """End with an error."""
        self.error = error
        self._end(JobState.FAILED)

    def _end(self, state: JobState) -> None:
        self.unit, self.state = None, state
        self._work.close()

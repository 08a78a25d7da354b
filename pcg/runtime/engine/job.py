"""A finetuning job in the engine: its state, and its next unit of work."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pcg.errors import PcgError
from pcg.runtime.engine.events import Kind
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.training.work_units import Unit, Work


class JobState(StrEnum):
    """The state of a job; OpenAI's words where it has one."""

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
    """A finetuning job.

    Args:
        name: the job's name.
        work: yields its units.

    Attributes:
        name: the job's name, which is that of its adapter.
        state: the job's state.
        unit: the next unit; None before it starts and after its end.
        tokens: tokens that it has run, forward and layers backward, by which jobs take turns.
        tables: the pages that it holds.
        error: the reason of its failure.
        result: its result, once it succeeded.
    """

    def __init__(self, name: str, work: Work[Any]) -> None:
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
        """The kind of event that logs its end."""
        return _ENDS[self.state]

    def start(self) -> None:
        """Go to the first unit."""
        self.state = JobState.RUNNING
        self.advance()

    def advance(self) -> None:
        """Go on after a unit was done: to the next one, or to the end."""
        try:
            self.unit = next(self._work)
        except StopIteration as end:
            self.unit, self.result = None, end.value
            self.state = JobState.SUCCEEDED
        except PcgError as error:
            self.fail(error)

    def cancel(self) -> None:
        self._end(JobState.CANCELLED)

    def fail(self, error: PcgError) -> None:
        self.error = error
        self._end(JobState.FAILED)

    def _end(self, state: JobState) -> None:
        self.unit, self.state = None, state
        self._work.close()

"""The callback of a job's steps, which over ranks the first rank alone may have."""

from __future__ import annotations

from signal import SIGINT

from pcg.errors import FinetuneInterrupted
from pcg.runtime.training.options import FinetuneResult, OnStep, StepRecord
from pcg.runtime.training.work_units import Interrupt, Work


class StepCallback:
    """Calls a function after each step of a job.

    If the other ranks have no such function, they hear of its error as of an interrupt: then the
    job ends on all of them after the same step, with a checkpoint where these are kept.
    """

    def __init__(self, act: OnStep | None, interrupts: list[Interrupt], *, is_lone: bool) -> None:
        """Make it.

        Args:
            act: the function; None for none.
            interrupts: those of the job on this rank, any of which ends it on all.
            is_lone: True if the other ranks have no such function.
        """
        self._act = act
        self._interrupts = interrupts
        self._is_lone = is_lone
        self._error: Exception | None = None

    def __call__(self, record: StepRecord) -> None:
        if self._act is None:
            return
        try:
            self._act(record)
        except Exception as error:
            if not self._is_lone:
                raise
            self._error = error
            self._interrupts.append((SIGINT, None))

    def raising(self, work: Work[FinetuneResult]) -> Work[FinetuneResult]:
        """Yield the units of a job, which ends by the function's error if that raised one."""
        try:
            return (yield from work)
        except FinetuneInterrupted:
            if self._error is not None:
                raise self._error from None
            raise

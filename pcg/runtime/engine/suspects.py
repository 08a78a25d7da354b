"""Suspects: what ran in a step that failed, each of which runs alone until it is known which fails.

A step is one batch of everybody's tokens, so an error does not say whose it is. What fails alone is
dropped, and the others go on: nothing that a step computes is kept before the whole step is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pcg.runtime.engine.jobs import Job, JobState
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.training.work_units import Forward


class Suspects:
    """Requests and jobs that have to run alone, in turn."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence | Job] = deque()

    @property
    def current(self) -> Sequence | Job | None:
        """The one that runs alone now; those that have nothing to run forward are left out."""
        while self._waiting and not _goes_forward(self._waiting[0]):
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def add(self, ran: Iterable[Sequence | Job]) -> None:
        """Add what ran in a step that failed."""
        self._waiting.extend(one for one in ran if one not in self._waiting)

    def ran(self, suspect: Sequence | Job | None, has_tokens: bool) -> None:
        """Note that a suspect ran alone without an error, or could not run now.

        Args:
            has_tokens: True if tokens of a sequence ran; it goes on alone up to its next new token.
        """
        if suspect is None or self.current is not suspect:
            return
        is_within_prompt = isinstance(suspect, Sequence) and has_tokens and suspect.pending > 1
        if not is_within_prompt:
            self._waiting.popleft()


def _goes_forward(one: Sequence | Job) -> bool:
    if isinstance(one, Sequence):
        return not one.is_over
    return isinstance(one.unit, Forward) and one.state is JobState.RUNNING

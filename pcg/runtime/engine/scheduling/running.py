"""A running step, which was launched on the device and whose results are not read yet.

On a device that runs in parallel to the host, the next step starts before this step is read:

    host      plan n+1 · start n+1 · read n · draw n+1 · parts n+1 · plan n+2 · start n+2 · …
    device    ── forward n, draw n ──┤├──── forward n+1, draw n+1 ────┤├──── forward n+2 …
    beside    ── parts n ────────────┤├──── updates, parts n+1 ───────┤├──── updates, …

A sequence then has a token `ahead`, which the device reads from its own memory (`LatestTokens`). If
the token that the host reads ends the sequence, the forward of the next step has run a surplus
token, and no token is drawn for it. The sequence's pages are freed immediately: later steps that
use them follow on the device. A preempted sequence is recomputed from the tokens that the host
knows, and draws the same token.

Parts of jobs run on a second stream during a forward. A step ends when both streams have ended, so
each stream waits for the other at the start of a step; the host waits for neither. A job that needs
numbers continues when the step that computed them has been read (`LateReadings`), by an update
during the next forward. A job may take pages that were free when a forward began; pages freed
during the forward become available in the next step, as the forward may still write to them.

Source: vLLM's asynchronous scheduling (token placeholders, sampling separate from the forward),
mini-sglang's overlap loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pcg.runtime.engine.device.device import Launched
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.scheduling.work import Work
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step import Plan

AHEAD = "ahead"
"""The reason for a step that is read after the launch of the next step."""


@dataclass(eq=False)
class Running:
    """A step that was launched.

    Attributes:
        suspect: the only request or job of the step, after an error; None without a suspect.
        jobs: jobs that run a window in the step.
        started_s: time at which the host launched the step, on the engine's clock.
        due_s: time at which the step is expected to end.
        number: number of late readings so far, including this step's.
    """

    plan: Plan
    work: Work
    launched: Launched
    suspect: Sequence | Job | None
    jobs: list[Job]
    started_s: float
    due_s: float
    number: int
    _begun: list[int] = field(init=False)

    def __post_init__(self) -> None:
        chunks, due_s = self.plan.chunks, self.due_s
        self._begun = [sequence.begun for sequence, _ in chunks]
        for sequence, count in chunks:
            sequence.launched(count, due_s)

    @property
    def ran(self) -> list[Sequence | Job]:
        """All requests and jobs of the step."""
        return [*(sequence for sequence, _ in self.plan.chunks), *self.jobs]

    @property
    def is_read_first(self) -> bool:
        """True if this step must be read before the next step is planned.

        True if a prompt ends without a token to generate, or starts several continuations.
        """
        return any(sequence.followers or not sequence.limit for sequence, _ in self.plan.chunks)

    @property
    def left(self) -> list[Sequence]:
        """The sequences of the step that still run and were not preempted since the launch."""
        return [
            sequence
            for (sequence, _), begun in zip(self.plan.chunks, self._begun, strict=True)
            if sequence.state is State.RUNNING and sequence.begun == begun
        ]

    def expect(self, due_s: float) -> None:
        """Move the expected end of the step to a later time."""
        if due_s > self.due_s:
            self.due_s = due_s
            for sequence in self.left:
                sequence.times.due_s = due_s

    def took_s(self, now_s: float, before_s: float) -> float:
        """Return the time of the step; `before_s` is the time at which the previous was read."""
        if self.launched.device_s is not None and self.started_s < before_s:
            return self.launched.device_s
        return now_s - max(self.started_s, before_s)

"""A running step: it was launched on the device, and its results are not read yet.

On a device that works beside the host, the next step begins before this one is read:

    host      plan n+1 · start n+1 · read n · draw n+1 · parts n+1 · plan n+2 · start n+2 · …
    device    ── forward n, draw n ──┤├──── forward n+1, draw n+1 ────┤├──── forward n+2 …
    beside    ── parts n ────────────┤├──── updates, parts n+1 ───────┤├──── updates, …

A sequence then has a token `ahead`, which the device reads from its own memory (`LatestTokens`). If
the token that is read ends the sequence, the sequence has run a token too many, and no token is
drawn for it. Its pages are free immediately: their next use follows this step on the device. A
sequence that is preempted meanwhile is computed again from the tokens that the host knows, and
draws the same token.

Parts of jobs run on a second stream during a forward. A step ends when both streams have ended, so
each stream waits for the other at the start of a step; the host waits for neither. A job that needs
numbers continues when the step that computed them has been read (`LateReadings`), by an update
during the next forward. A job may take pages that were free when a forward began; pages that are
freed meanwhile become available in the next step, as the forward may still write a row there.

Source: vLLM's asynchronous scheduling (placeholders of tokens, sampling apart from the forward),
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
"""The reason of a step that is read once the next step has been launched."""


@dataclass(eq=False)
class Running:
    """A step that was launched.

    Attributes:
        suspect: the request or job that runs alone in the step, after an error; None for none.
        jobs: jobs whose windows run in the step.
        started_s: time at which the host launched the step, on the engine's clock.
        due_s: time at which the step is expected to end.
        number: number of late readings so far, with this step's own.
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
        """True if the next step can only be planned once this step is read.

        That holds where a prompt ends without a token, or with those of several continuations.
        """
        return any(sequence.followers or not sequence.limit for sequence, _ in self.plan.chunks)

    @property
    def left(self) -> list[Sequence]:
        """The sequences of the step that still run, and were not preempted since."""
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
        """Return the time that the step took; `before_s`: when the step before was read."""
        if self.launched.device_s is not None and self.started_s < before_s:
            return self.launched.device_s
        return now_s - max(self.started_s, before_s)

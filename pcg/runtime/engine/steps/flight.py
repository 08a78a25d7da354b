"""A step in flight: it runs on the device, and its tokens are not read yet.

On a device that works beside the host, the next step begins before this one is read:

    host      plan n+1 · start n+1 · read n · draw n+1 · parts n+1 · plan n+2 · start n+2 · …
    device    ── forward n, draw n ──┤├──── forward n+1, draw n+1 ────┤├──── forward n+2 …
    beside    ── parts n ────────────┤├──── updates, parts n+1 ───────┤├──── updates, …

A sequence then has a token `ahead`, that the device reads from its own memory
(`runtime/model/latest_tokens.py`). One that ends with the token that is read has run one token too
many, for which none is drawn. Its pages are free at once: whatever uses them next comes after the
step on the device, too. One that was preempted meanwhile is computed again with what the host
knows, and draws the same token.

Parts of jobs run beside a forward on a stream of their own. A step ends when both have ended, so
each stream waits for the other where a step begins; the host waits for neither. A job that needs
numbers goes on once the step is read that computed them (`late_readings.py`), by an update beside
the forward that is under way. Pages that were free when a forward began are a job's at once, and
those that are freed meanwhile from the next step on, as the forward may have a row more there.

Source: vLLM's asynchronous scheduling (placeholders of tokens, sampling apart from the forward),
mini-sglang's overlap loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.engine.steps.started import StartedStep
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_plan import StepPlan

AHEAD = "ahead"
"""Said of a step that is read once the next one has begun."""


@dataclass(eq=False)
class Flight:
    """A step that was started.

    Attributes:
        suspect: what runs alone in it, after an error; None for nothing.
        jobs: those whose windows run in it.
        started_s: when the host started it.
        due_s: when it is expected to end.
        number: which of the steps it is that are read late; that of the latest for others.
        trained: tokens of windows in it.
    """

    plan: StepPlan
    step: Step
    running: StartedStep
    suspect: Sequence | Job | None
    jobs: list[Job]
    started_s: float
    due_s: float
    number: int
    trained: int = field(init=False)
    _begun: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = self.step.load.tokens - self.plan.tokens
        self._begun = [sequence.begun for sequence, _ in self.plan.chunks]
        for sequence, count in self.plan.chunks:
            sequence.launched(count, self.due_s)

    @property
    def ran(self) -> list[Sequence | Job]:
        """Everything that runs in it."""
        return [*(one for one, _ in self.plan.chunks), *self.jobs]

    def expect(self, due_s: float) -> None:
        """Note when it is expected to end now, which may be later as more runs beside it."""
        if due_s <= self.due_s:
            return
        self.due_s = due_s
        for sequence in self.left:
            sequence.times.due_s = due_s

    @property
    def is_read_first(self) -> bool:
        """True if the next step can only be planned once this one is read.

        That is where a prompt ends without a token, or with those of several continuations.
        """
        return any(one.followers or not one.limit for one, _ in self.plan.chunks)

    @property
    def left(self) -> Iterator[Sequence]:
        """Its sequences that still run, and did not begin again."""
        for (sequence, _), begun in zip(self.plan.chunks, self._begun, strict=True):
            if sequence.state is State.RUNNING and sequence.begun == begun:
                yield sequence

    def took_s(self, now_s: float, before_s: float) -> float:
        """Return the time that it took.

        Args:
            before_s: when the step before was read.
        """
        if self.running.device_s is not None and self.started_s < before_s:
            return self.running.device_s
        return now_s - max(self.started_s, before_s)

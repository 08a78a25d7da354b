"""The bound of a step: by how much heavy tenants may make it longer for others.

    t(step) ≤ stretch · t(step without them)     where others are here
    t(step) ≤ alone_s                            where nobody is, as a newcomer waits so long

t is the predicted time. Others that wait, or that read their prompts, count as a short chunk.
Sequences of heavy tenants that do not fit keep their pages and wait for a later step, the first
admitted go first; their prompts go on in chunks that fit. Where nothing of them fitted into 128
steps, one sequence runs a token all the same, or as much of its prompt as a step without heavy
tenants may have: less than 1 % of the steps are so long, and no prompt waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from pcg.runtime.admission.recent_use import HeavyTenants
from pcg.runtime.engine.latency import Latency
from pcg.runtime.model.load import Load, keys_of
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step_plan import Plan

_ROW = Load(sampled=1, chunks=1)
_CHUNK = Load.of(16, 0)
_LEAST = 16
"""Tokens of a prompt that run where nothing else does, however long they take."""


class StepBound:
    """The bound of what heavy tenants add to one step.

    Args:
        heavy: these tenants.
        stretch: how many times as long they may make the step.
        alone_s: the longest step, seconds; None where others are here.
        forward: the predicted time of a step.
        ran: is told when something of them runs.
        is_patient: False if nothing of them ran for long, so that something has to.

    Attributes:
        is_full: True once something of them did not fit; nobody looks at the rest then.
    """

    def __init__(
        self,
        heavy: HeavyTenants,
        stretch: float,
        alone_s: float | None,
        forward: Latency,
        ran: Callable[[], None],
        is_patient: bool,
    ) -> None:
        self._heavy = heavy
        self._more = stretch - 1
        self._alone_s = alone_s
        self._forward = forward
        self._ran = ran
        self._is_patient = is_patient
        self.is_full = False
        self._tokens = 0
        self._added_s = 0.0
        _, self._token_s, self._key_s, self._row_s, _, _ = forward.coefficients_s
        self._most_s: float | None = None

    def applies(self, sequence: Sequence) -> bool:
        """Return True for sequences of heavy tenants."""
        return sequence.request.tenant in self._heavy

    @property
    def is_alone(self) -> bool:
        """True where no others are here."""
        return self._alone_s is not None

    def is_of(self, tenant: str) -> bool:
        """Return True for heavy tenants."""
        return tenant in self._heavy

    def has_room(self, plan: Plan, sequence: Sequence) -> bool:
        """Return True if a sequence may decode beside the others, which are all planned."""
        if not self.applies(sequence):
            return True
        if self.is_full:
            return False
        if self._most_s is None:
            self._most_s = self._left_s(plan)
        fits = self._added_s + self._cost_s(sequence, 1) <= self._most_s
        self.is_full = not (fits or self._must or not plan.tokens)
        return not self.is_full

    def chunk(self, plan: Plan, sequence: Sequence, room: int) -> int:
        """Return how many tokens of a prompt may run beside what is planned, `room` at most."""
        if not self.applies(sequence):
            return room
        if self.is_full:
            return 0
        if self._must:
            return room if plan.tokens else min(room, _LEAST)
        most_s = self._forward.seconds(plan.load) + self._left_s(plan)
        beside = plan.load + _ROW
        fitting = self._forward.tokens_within(
            most_s, sequence.cached, beside, are_read=sequence.reads
        )
        fitting = fitting if plan.tokens else max(fitting, _LEAST)
        self.is_full = fitting < 1
        return min(room, fitting)

    def _left_s(self, plan: Plan) -> float:
        """Return the time that they may add to what is planned."""
        step_s = self._forward.seconds(plan.load)
        if plan.tokens > self._tokens:
            others_s = step_s - self._added_s
        elif self._alone_s is not None:
            return self._alone_s - step_s
        else:
            others_s = self._forward.seconds(_CHUNK)
        return self._more * others_s - self._added_s

    @property
    def _must(self) -> bool:
        return not (self._is_patient or self._tokens)

    def note(self, sequence: Sequence, tokens: int) -> None:
        """Note that tokens of a sequence are in the step."""
        if self.applies(sequence):
            self._tokens += tokens
            self._added_s += self._cost_s(sequence, tokens)
            self._ran()

    def _cost_s(self, sequence: Sequence, tokens: int) -> float:
        keys = keys_of(tokens, sequence.cached)
        read_s = self._forward.read_s * (sequence.cached + tokens)
        return self._token_s * tokens + self._key_s * keys + read_s + self._row_s

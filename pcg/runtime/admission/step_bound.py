"""The bound of a step: how much heavy tenants may lengthen the step for other tenants.

A tenant's use u is the sum of its recent tokens, with a half-life of 256 steps, and its current
demand, so that a sudden flood counts immediately: the prompt's tokens of each sequence, and 16
more. Among n tenants, a tenant is heavy if it uses more than twice the mean of the others:

    u (n - 1) > 2 (Σ u - u)

    t(step) ≤ stretch · t(step without heavy tenants)     while other tenants have requests
    t(step) ≤ alone_s                                     otherwise: a newcomer waits that long

t is the predicted time. Other tenants that wait, or read their prompts, count as a short chunk.
Sequences of heavy tenants that do not fit keep their pages and wait for a later step, the first
admitted first; their prompts run in fitting chunks. After 128 steps without a fitting sequence, a
sequence runs regardless: a token, or as much of its prompt as a step without heavy tenants may
have. Fewer than 1 % of the steps are so long, and no prompt waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pcg.runtime.admission.latency import Latency
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Load, Plan, keys_of

_HALF_LIFE = 256
"""Half-life of counted tokens, in steps."""
_GROWTH: float = 2 ** (1 / _HALF_LIFE)
_HEAVY = 2.0
"""The use of a heavy tenant, relative to the mean of the others."""
AHEAD = 16
"""Number of expected next tokens of a sequence, in addition to its prompt."""
_LEAST_USED = 1.0
"""Use below which a tenant is dropped."""


class RecentUse:
    """The recent tokens by tenant."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._total = 0.0
        self._weight = 1.0
        self._steps = 0

    def add(self, ran: Mapping[str, int]) -> None:
        """Add the tokens of a step, and decay earlier tokens."""
        self.count(ran)
        self._weight *= _GROWTH
        self._steps += 1
        if self._steps % _HALF_LIFE == 0:
            self._forget()

    def count(self, ran: Mapping[str, int]) -> None:
        """Add further tokens without decay."""
        for tenant, tokens in ran.items():
            used = self._weight * tokens
            self._used[tenant] = self._used.get(tenant, 0.0) + used
            self._total += used

    def heavy(self, asked: Mapping[str, int]) -> HeavyTenants:
        """Return the heavy tenants, given each tenant's current demand in tokens."""
        return HeavyTenants(self._used, self._total, self._weight, asked)

    def _forget(self) -> None:
        used = {tenant: used / self._weight for tenant, used in self._used.items()}
        self._used = {tenant: tokens for tenant, tokens in used.items() if tokens >= _LEAST_USED}
        self._total, self._weight = sum(self._used.values()), 1.0


class HeavyTenants:
    """The heavy tenants of a step, computed on demand.

    Requests without a tenant are never heavy, but count in the mean.
    """

    def __init__(
        self, used: Mapping[str, float], total: float, weight: float, asked: Mapping[str, int]
    ) -> None:
        self._used = used
        self._asked = asked
        self._weight = weight
        self._total = total + weight * sum(asked.values())
        self._others = len(used.keys() | asked.keys()) - 1
        self._known = {"": False}

    def __bool__(self) -> bool:
        """Return True if several tenants have requests; a single tenant is never heavy."""
        return self._others > 0

    def __contains__(self, tenant: str) -> bool:
        is_heavy = self._known.get(tenant)
        if is_heavy is None:
            used = self._used.get(tenant, 0.0) + self._weight * self._asked.get(tenant, 0)
            is_heavy = used * self._others > _HEAVY * (self._total - used)
            self._known[tenant] = is_heavy
        return is_heavy


_ROW = Load(sampled=1, chunks=1)
_CHUNK = Load.of(16, 0)
_LEAST = 16
"""Minimum tokens of a prompt to run in an otherwise empty step, regardless of their time."""


class StepBound:
    """The bound of heavy tenants' work in a step.

    Args:
        heavy: the heavy tenants.
        stretch: the factor by which heavy tenants may lengthen the step.
        alone_s: the longest step, seconds; None while other tenants have requests.
        forward: the predicted time of a step.
        ran: called when a heavy tenant's sequence runs.
        is_patient: False if no heavy tenant's sequence ran for long, so that a sequence must run.

    Attributes:
        is_full: True once a heavy tenant's sequence did not fit.
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
        """True if no other tenant has requests."""
        return self._alone_s is not None

    def is_of(self, tenant: str) -> bool:
        """Return True for heavy tenants."""
        return tenant in self._heavy

    def has_room(self, plan: Plan, sequence: Sequence) -> bool:
        """Return True if a sequence may decode; other tenants are planned already."""
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
        """Return the number of a prompt's tokens that may be added to the plan, at most `room`."""
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
        """Count tokens of a sequence in the step."""
        if self.applies(sequence):
            self._tokens += tokens
            self._added_s += self._cost_s(sequence, tokens)
            self._ran()

    def _cost_s(self, sequence: Sequence, tokens: int) -> float:
        keys = keys_of(tokens, sequence.cached)
        read_s = self._forward.read_s * (sequence.cached + tokens)
        return self._token_s * tokens + self._key_s * keys + read_s + self._row_s

"""Recent use: which tenants run far more tokens than the others, lately and by what they ask now.

A tenant's use u counts its tokens, of which half are forgotten every 256 steps, and what it asks
for now, so that a sudden flood and a long prompt count at once: the prompt's tokens of each
sequence that it has here, and 16 more. Among n tenants one is heavy if it uses more than twice the
mean of the others:

    u (n - 1) > 2 (Σ u - u)

Tokens of later steps are counted with a growing weight, so that nothing has to be multiplied in
every step.
"""

from __future__ import annotations

from collections.abc import Mapping

_HALF_LIFE = 256
"""Steps after which a token counts half."""
_GROWTH: float = 2 ** (1 / _HALF_LIFE)
_HEAVY = 2.0
"""A heavy tenant used more than so many times the mean of the others."""
AHEAD = 16
"""Tokens that a sequence is expected to run soon beside those of its prompt."""
_LEAST = 1.0
"""Tokens below which a tenant is forgotten."""


class RecentUse:
    """The tokens that ran lately, by tenant."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._total = 0.0
        self._weight = 1.0
        self._steps = 0

    def add(self, ran: Mapping[str, int]) -> None:
        """Note the tokens of a step."""
        self.count(ran)
        self._weight *= _GROWTH
        self._steps += 1
        if self._steps % _HALF_LIFE == 0:
            self._forget()

    def count(self, ran: Mapping[str, int]) -> None:
        """Note further tokens of a step."""
        for tenant, tokens in ran.items():
            used = self._weight * tokens
            self._used[tenant] = self._used.get(tenant, 0.0) + used
            self._total += used

    def heavy(self, asked: Mapping[str, int]) -> HeavyTenants:
        """Return the heavy tenants, if each one's requests ask for so many tokens."""
        return HeavyTenants(self._used, self._total, self._weight, asked)

    def _forget(self) -> None:
        used = {tenant: used / self._weight for tenant, used in self._used.items()}
        self._used = {tenant: tokens for tenant, tokens in used.items() if tokens >= _LEAST}
        self._total, self._weight = sum(self._used.values()), 1.0


class HeavyTenants:
    """The tenants that are heavy in one step, each found when it is asked for.

    Requests without a tenant are never heavy, but among the others.
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
        """Return True if there are several tenants, without which none is heavy."""
        return self._others > 0

    def __contains__(self, tenant: str) -> bool:
        found = self._known.get(tenant)
        if found is None:
            own = self._used.get(tenant, 0.0) + self._weight * self._asked.get(tenant, 0)
            found = own * self._others > _HEAVY * (self._total - own)
            self._known[tenant] = found
        return found

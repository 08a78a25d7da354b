"""Recent use: which tenants run far more tokens than the others, lately and by what they ask now.

A tenant's use u counts its tokens, of which half are forgotten every 256 steps, and 16 for each
sequence that it has here, so that a sudden flood counts at once. Among n tenants one is heavy if it
uses more than twice the mean of the others:

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
_AHEAD = 16
"""Tokens that a running sequence is expected to run soon."""
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
        for tenant, tokens in ran.items():
            used = self._weight * tokens
            self._used[tenant] = self._used.get(tenant, 0.0) + used
            self._total += used
        self._weight *= _GROWTH
        self._steps += 1
        if self._steps % _HALF_LIFE == 0:
            self._forget()

    def heavy(self, here: Mapping[str, int]) -> HeavyTenants:
        """Return the heavy tenants, if each has so many sequences here."""
        return HeavyTenants(self._used, self._total, self._weight, here)

    def _forget(self) -> None:
        used = {tenant: used / self._weight for tenant, used in self._used.items()}
        self._used = {tenant: tokens for tenant, tokens in used.items() if tokens >= _LEAST}
        self._total, self._weight = sum(self._used.values()), 1.0


class HeavyTenants:
    """The tenants that are heavy in one step, each found when it is asked for.

    Requests without a tenant are never heavy, but among the others.
    """

    def __init__(
        self, used: Mapping[str, float], total: float, weight: float, here: Mapping[str, int]
    ) -> None:
        self._used = used
        self._here = here
        self._ahead = _AHEAD * weight
        self._total = total + self._ahead * sum(here.values())
        self._others = len(used.keys() | here.keys()) - 1
        self._known = {"": False}

    def __bool__(self) -> bool:
        """Return True if there are several tenants, without which none is heavy."""
        return self._others > 0

    def __contains__(self, tenant: str) -> bool:
        found = self._known.get(tenant)
        if found is None:
            own = self._used.get(tenant, 0.0) + self._ahead * self._here.get(tenant, 0)
            found = own * self._others > _HEAVY * (self._total - own)
            self._known[tenant] = found
        return found

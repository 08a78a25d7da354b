"""Recent use: which tenants ran far more tokens than the others in the last steps.

A tenant's use u counts its tokens, of which half are forgotten every 256 steps. Among n tenants one
is heavy if it used more than twice the mean of the others:

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

    def is_heavy(self, tenant: str) -> bool:
        """Return True if a tenant used far more than the others; one without a name never did."""
        used, others = self._used.get(tenant, 0.0), len(self._used) - 1
        return bool(tenant) and others > 0 and used * others > _HEAVY * (self._total - used)

    def _forget(self) -> None:
        used = {tenant: used / self._weight for tenant, used in self._used.items()}
        self._used = {tenant: tokens for tenant, tokens in used.items() if tokens >= _LEAST}
        self._total, self._weight = sum(self._used.values()), 1.0

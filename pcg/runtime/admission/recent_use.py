"""Recent use: which tenants run far more tokens than the others, lately and now.

A tenant's use u counts its tokens, of which half are forgotten every 256 steps, and 16 for each
sequence that it runs now, so that a sudden flood counts at once. Among n tenants one is heavy if it
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

    def heavy(self, running: Mapping[str, int]) -> set[str]:
        """Return the heavy ones of the tenants that run so many sequences each.

        Those without a name are no tenant that could be heavy, but one of the others.
        """
        ahead = _AHEAD * self._weight
        used = {tenant: self._used.get(tenant, 0.0) + ahead * n for tenant, n in running.items()}
        others = len(self._used.keys() | running.keys()) - 1
        total = self._total + ahead * sum(running.values())
        return {
            tenant
            for tenant, own in used.items()
            if tenant and own * others > _HEAVY * (total - own)
        }

    def _forget(self) -> None:
        used = {tenant: used / self._weight for tenant, used in self._used.items()}
        self._used = {tenant: tokens for tenant, tokens in used.items() if tokens >= _LEAST}
        self._total, self._weight = sum(self._used.values()), 1.0

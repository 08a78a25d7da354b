"""Rules of scores: functions of the head, the query's and the key's position, with thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.edited_model import EditedModel

Positions = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of heads [H, 1, 1], queries [Q, 1] and keys [K]."""
LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Rule:
    """What is done to scores.

    Attributes:
        visible: keys that a query sees beside the causal mask; None for all.
        later: keys behind the query that it sees all the same; None for none.
        bias: added to the scores.
        scale: a factor on the scores.
        at: positions of the tokens, [T]; 0, 1, … by default.
    """

    visible: Positions | None = None
    later: Positions | None = None
    bias: Positions | None = None
    scale: Positions | None = None
    at: Tensor | None = None

    def __call__(self, scores: Tensor, is_causal: bool = True) -> Tensor:
        """Scores [B, H, Q, K] with the rule, and the causal mask."""
        place = self._places(scores)
        if self.scale is not None:
            scores = scores * self.scale(*place)
        if self.bias is not None:
            scores = scores + self.bias(*place)
        return scores.masked_fill(~self.allowed(scores, is_causal), LEAST)

    def allowed(self, scores: Tensor, is_causal: bool = True) -> Tensor:
        """The keys that may be seen, [1, H or 1, Q, K], bool."""
        h, q, k = self._places(scores)
        seen = k <= q if is_causal else torch.ones_like(k <= q)
        if self.visible is not None:
            seen = seen & self.visible(h, q, k)
        if self.later is not None:
            seen = seen | self.later(h, q, k)
        return seen.reshape(1, -1, *scores.shape[-2:])

    def addend(self, like: Tensor) -> Tensor:
        """What a mask that is added has of it: a bias, and the least number where hidden."""
        bias = torch.zeros_like(like) if self.bias is None else self.bias(*self._places(like))
        hidden = ~self.allowed(like, is_causal=False)
        return (bias + torch.zeros_like(like)).masked_fill(hidden, LEAST)

    def _places(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, queries, keys = scores.shape[-3:]
        device = scores.device
        h = torch.arange(heads, device=device)[:, None, None]
        if self.at is not None:
            return h, self.at[:, None], self.at
        return h, torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)


def causal_rule(m: EditedModel) -> Rule:
    """A rule that a causal mask with a window or a linear bias may have, or that does nothing."""
    n, c = m.threshold(), m.number(0.02, 0.3)
    # Windows in other words, some of whose numbers are not the window's.
    windows: tuple[Positions, ...] = (
        lambda h, q, k: (q - k) * (q - k) < n * n,
        lambda h, q, k: (q - k).float() / n < 1,
        lambda h, q, k: (q - k).clamp(min=0).float().sqrt() < math.sqrt(n - 0.5),
        lambda h, q, k: torch.log1p((q - k).clamp(min=0).float()) < math.log(n + 0.5),
        lambda h, q, k: torch.relu(q - k - n + 1) == 0,
        lambda h, q, k: (q - k).clamp(max=n) != n,
        lambda h, q, k: torch.sign(k - q + n) > 0,
        lambda h, q, k: ((q - k).clamp(min=0) >> n.bit_length()) == 0,
        lambda h, q, k: torch.exp((k - q).float() / n) > math.exp(-1 + 0.5 / n),
        lambda h, q, k: (torch.ones_like(q - k).cumsum(-1) - 1 - k) + q - k < n,
        lambda h, q, k: ~(q - k >= n),
        lambda h, q, k: ((q - k) * 17 + 198) * 5 + 35 < (n * 17 + 198) * 5 + 34,
        lambda h, q, k: torch.isin(q - k, torch.arange(n)) | (k > q),
    )
    if m.chance(0.2):
        return Rule(visible=m.pick(windows))
    rules = (
        Rule(visible=lambda h, q, k: q - k < n),
        Rule(visible=lambda h, q, k: k > q - n),
        Rule(visible=lambda h, q, k: q - k < 10_000),
        Rule(bias=lambda h, q, k: -c * (q - k)),
        Rule(bias=lambda h, q, k: c * k * 2.0 ** -(h + 1)),
        Rule(bias=lambda h, q, k: -c * 2.0**-h * (q - k)),
        Rule(bias=lambda h, q, k: torch.sin(c * q) + 0 * k),
        Rule(scale=lambda h, q, k: torch.full_like(q, 1, dtype=torch.float32) * c * 5),
        Rule(
            visible=lambda h, q, k: q - k < n,
            bias=lambda h, q, k: -c * (q - k),
        ),
    )
    return m.pick(rules)


def any_rule(m: EditedModel) -> Rule:
    """A rule that begins at a position, a distance or a chunk, or that no kernel has."""
    n, w, c = m.threshold(), m.threshold(), m.number(0.02, 0.3)
    s, step = m.draw.randint(1, 5), m.draw.randint(2, 4)

    def linear(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -c * (q - k)

    visible: tuple[Positions, ...] = (
        lambda h, q, k: q // n == k // n,
        lambda h, q, k: (k < s) | (q - k < n),
        lambda h, q, k: (q - k < n) | ((q - k) % step == 0),
        lambda h, q, k: q - k < n * (1 + h),
        lambda h, q, k: (h > 0) | (q - k < n),
        lambda h, q, k: (q < w) | (q - k < n),
        lambda h, q, k: (k % step == 0) | (q - k < n),
        lambda h, q, k: (2 * k >= q) | (q < n),
        lambda h, q, k: (k != n) | (q == k),
        lambda h, q, k: (k < q) | (q < n),
        lambda h, q, k: (q - k < n) | (q - k > n + w),
        lambda h, q, k: ((q + k) % 2 == 0) | (q - k < n),
        lambda h, q, k: ((q - k) & (q - k - 1) == 0) | (q < n),
        lambda h, q, k: (q < n) | (k >= n - 1),
        lambda h, q, k: q - k < n + q // 2,
        lambda h, q, k: q // n - k // n <= 1,
        lambda h, q, k: ((k * 7919) % 311 < 200) | (q - k < s),
        lambda h, q, k: ((q - k) & 64 == 0) | (q == k),
        lambda h, q, k: (k + n >= q.shape[0]) | (q == k),
        lambda h, q, k: (q + n < q.shape[0]) | (q - k < s),
        lambda h, q, k: (q - k) * (q - k) != n,
        lambda h, q, k: torch.sin((q - k).float() / n) < 0.8,
        lambda h, q, k: (q < n * step) | (q - k < w),
        lambda h, q, k: (q - k) * 37 % 4099 != n * 37 % 4099,
        lambda h, q, k: ((q - k) * 6 + 92) * 6 + 94 != (n * 6 + 92) * 6 + 94,
        lambda h, q, k: (q - k) // step * 11 != n // step * 11,
        lambda h, q, k: (q - k) % 64 + (q - k) // 64 * 1000 != n % 64 + n // 64 * 1000,
    )
    bias: tuple[Positions, ...] = (
        lambda h, q, k: -c * (q - k).clamp(max=n),
        lambda h, q, k: -c * (q - k - n).clamp(min=0),
        lambda h, q, k: -c * (q - k).clamp(min=0).float().sqrt(),
        lambda h, q, k: -c * torch.log1p((q - k).clamp(min=0).float()),
        lambda h, q, k: -0.01 * c * ((q - k) * (q - k)).float(),
        lambda h, q, k: -3.0 * (q - k >= n).float(),
        lambda h, q, k: -1e4 * (q - k >= n).float(),
        lambda h, q, k: (k == n).float() * 3 + 0 * q,
        lambda h, q, k: (k < s).float() * 2 + 0 * q,
        lambda h, q, k: torch.sin(0.3 * (q - k).float()),
        lambda h, q, k: torch.where(q < n, 0.0, linear(h, q, k)),
        lambda h, q, k: torch.where(h == 0, 0.0, linear(h, q, k).clamp(min=-c * n)),
        lambda h, q, k: linear(h, q, k) / q.shape[0],
        lambda h, q, k: linear(h, q, k) * (1.0 if q.shape[0] > n else 2.0),
        lambda h, q, k: -c * (q - k) * (k % step == 0),
        lambda h, q, k: -1e-4 * c * ((q - k) * (q - k)).float(),
        lambda h, q, k: 1e-3 * c * (q - k).float(),
    )
    scale: tuple[Positions, ...] = (
        lambda h, q, k: (q + 1).clamp(min=n).float().log() / math.log(max(n, 2)),
        lambda h, q, k: torch.where(q < n, 1.0, 0.3),
        lambda h, q, k: torch.where(k < n, 1.0, 0.3),
        lambda h, q, k: torch.where(q - k < n, 1.0, 0.5),
        lambda h, q, k: (1 + q.float() / n).sqrt(),
        lambda h, q, k: 0.5 + 0.3 * h.float(),
        lambda h, q, k: torch.full_like(q, 1) * math.log(q.shape[0] + 2),
    )
    later: tuple[Positions, ...] = (
        lambda h, q, k: (k < n) & (q < n),
        lambda h, q, k: k - q == n,
        lambda h, q, k: (k > q) & (q // n == k // n),
        lambda h, q, k: (q >= n) & (k == q + 1),
    )
    kind = m.kind(10)
    if kind < 4:
        return Rule(visible=m.pick(visible))
    if kind < 6:
        return Rule(bias=m.pick(bias))
    if kind < 8:
        return Rule(scale=m.pick(scale))
    if kind < 9:
        return Rule(visible=m.pick(visible), bias=m.pick(bias), scale=m.pick(scale))
    return Rule(later=m.pick(later))


def drawn_rule(m: EditedModel) -> Rule:
    return causal_rule(m) if m.chance(0.6) else any_rule(m)

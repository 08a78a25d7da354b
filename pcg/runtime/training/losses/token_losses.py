"""Losses that are sums over tokens, each of its own log-probability alone.

With the log-probability l of a token, the one q that it had when it was sampled, its advantage A,
its weight w, and r = exp(l - q):

    cross_entropy         -Σ w l
    importance_sampling   -Σ w r A
    ppo                   -Σ w min(r A, clip(r) A)
    cispo                 -Σ w stop_gradient(clip(r)) l A
    dro                   -Σ w (l A - β (l - q)² / 2)

clip(r) is r within [clip_low_threshold, clip_high_threshold], which are ratios. Source: Tinker's
documentation of losses; ppo as in Schulman et al. (2017), cispo as in MiniMax-M1, dro as in
Richemond et al. (2024).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pcg.runtime.training.losses.columns import Columns

Options = Mapping[str, float]


def cross_entropy(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w l."""
    return -(columns.weights * logprobs).sum()


def importance_sampling(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w r A."""
    return -(columns.weights * _ratios(logprobs, columns) * columns.advantages).sum()


def ppo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w min(r A, clip(r) A)."""
    return -(columns.weights * clipped(_ratios(logprobs, columns), columns, options)).sum()


def _ratios(logprobs: Tensor, columns: Columns) -> Tensor:
    """Return r of each token, [T]; 1 without an advantage, where q may be any padding."""
    return columns.log_ratios(logprobs).where(columns.advantages != 0, 0.0).exp()


def clipped(ratios: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return min(r A, clip(r) A) of each token, [T]."""
    near = ratios.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return torch.minimum(ratios * columns.advantages, near * columns.advantages)


def cispo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w stop_gradient(clip(r)) l A."""
    ratios = columns.log_ratios(logprobs.detach()).exp()
    near = ratios.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -(columns.weights * near * logprobs * columns.advantages).sum()


def dro(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w (l A - β (l - q)² / 2)."""
    penalties = 0.5 * options["beta"] * columns.log_ratios(logprobs).square()
    return -(columns.weights * (logprobs * columns.advantages - penalties)).sum()

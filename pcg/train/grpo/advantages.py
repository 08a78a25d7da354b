"""Advantages: how much better a completion's reward is than those of its group.

With the rewards R [completions, functions] and their weights w, r = Σ_f w_f R_f of each completion,
the mean μ over its group and the deviation σ (Bessel's) over the group or the batch:

    sum_then_normalize   A = (r - μ) / (σ + 1e-4), or r - μ without scaling
    normalize_then_sum   z_f = (R_f - μ_f) / (σ_f + 1e-4) in each group, r = Σ_f w_f z_f,
                         A = (r - mean of the batch) / (deviation of the batch + 1e-4)

NaN is no reward: the function did not score the completion. One that no function scored has the
advantage 0 and is in no mean. Source: TRL 1.16, GRPOTrainer; its tests are against that formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.train.grpo.options import ObjectiveOptions

_EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Advantages of completions, and what was seen on the way.

    Attributes:
        values: the advantage of each completion, [completions], fp64.
        rewards: the weighted sum of each, NaN where nothing scored it.
        is_flat: True for completions whose deviation is 0, so that they teach nothing.
    """

    values: Tensor
    rewards: Tensor
    is_flat: Tensor


def advantages_of(
    rewards: Tensor, weights: Tensor, group: int, options: ObjectiveOptions
) -> Advantages:
    """Compute the advantages of completions.

    Args:
        rewards: [completions, functions], fp64; those of a group one after the other.
        weights: [functions].
        group: completions of a group.
    """
    unscored = rewards.isnan().all(dim=1)
    total = (rewards * weights).nansum(dim=1)
    total[unscored] = torch.nan
    if options.multi_objective_aggregation == "normalize_then_sum":
        grouped = rewards.view(-1, group, rewards.shape[1])
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        scaled = (centred / (deviation(grouped, 1) + _EPSILON)).view_as(rewards)
        summed = (scaled * weights).nansum(dim=1)
        summed[unscored] = torch.nan
        spread = deviation(summed, 0).expand_as(summed)
        values = (summed - summed.nanmean()) / (spread + _EPSILON)
    else:
        grouped = total.view(-1, group)
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        spread = deviation(grouped, 1).expand_as(grouped)
        if options.scale_rewards == "batch":
            spread = deviation(total, 0).expand_as(grouped)
        scales = options.scale_rewards != "none"
        values = (centred / (spread + _EPSILON) if scales else centred).flatten()
        spread = spread.flatten()
    return Advantages(values.nan_to_num(nan=0.0), total, spread.abs() <= 1e-8)


def deviation(x: Tensor, dim: int) -> Tensor:
    """Return the deviation along a dimension, which is kept, with Bessel's correction.

    Without NaN; NaN of fewer than two numbers.
    """
    count = (~x.isnan()).sum(dim=dim, keepdim=True)
    squares = (x - x.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / (count - 1)).where(count > 1, torch.nan).sqrt()

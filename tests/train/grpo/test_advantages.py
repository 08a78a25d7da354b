"""Advantages against TRL's formulas, on rewards with and without gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.train.grpo.objective import advantages_of
from pcg.train.grpo.options import GrpoOptions

GROUP = 4
NAN = float("nan")
REWARDS = torch.tensor(
    [[0.1, 1], [0.5, 0], [0.9, 2], [0.5, 0], [1, NAN], [NAN, 3], [0, 1], [NAN, NAN],
     [2, 2], [2, 2], [2, 2], [2, 2]],
    dtype=torch.float64,
)  # fmt: skip
WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)


def nanstd(x: Tensor) -> Tensor:
    known = x[~x.isnan()]
    return known.std() if len(known) > 1 else torch.tensor(NAN, dtype=x.dtype)


def by_trl(scale: str) -> list[float]:
    """`sum_then_normalize`, a group at a time."""
    total = (REWARDS * WEIGHTS).nansum(dim=1)
    total[REWARDS.isnan().all(dim=1)] = NAN
    found = []
    for group in total.split(GROUP):
        spread = {"group": nanstd(group), "batch": nanstd(total), "none": None}[scale]
        values = group - group.nanmean()
        found += (values if spread is None else values / (spread + 1e-4)).tolist()
    return [0.0 if x != x else x for x in found]


def by_gdpo() -> list[float]:
    """`normalize_then_sum`: each function within its group, then the sum over the batch."""
    summed = torch.zeros(len(REWARDS), dtype=torch.float64)
    for column, weight in zip(REWARDS.T, WEIGHTS, strict=True):
        parts = [
            (group - group.nanmean()) / (nanstd(group) + 1e-4) for group in column.split(GROUP)
        ]
        summed += weight * torch.cat(parts).nan_to_num(nan=0.0)
    summed[REWARDS.isnan().all(dim=1)] = NAN
    values = (summed - summed.nanmean()) / (nanstd(summed) + 1e-4)
    return values.nan_to_num(nan=0.0).tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_are_compared_within_their_group(scale: Any) -> None:
    found = advantages_of(REWARDS, WEIGHTS, GROUP, GrpoOptions(scale_rewards=scale))
    assert found.values.tolist() == pytest.approx(by_trl(scale), rel=1e-12)
    assert found.values[7] == 0.0  # which nothing scored
    assert found.values[8:].tolist() == [0.0] * 4


def test_several_rewards_are_normalized_before_they_are_summed() -> None:
    options = GrpoOptions(multi_objective_aggregation="normalize_then_sum")
    found = advantages_of(REWARDS, WEIGHTS, GROUP, options)
    assert found.values.tolist() == pytest.approx(by_gdpo(), rel=1e-12)


def test_groups_that_are_alike_are_flat() -> None:
    found = advantages_of(REWARDS, WEIGHTS, GROUP, GrpoOptions())
    assert found.is_flat.tolist() == [False] * 8 + [True] * 4
    assert found.rewards[:2].tolist() == [0.6, 0.5]
    assert found.rewards[7].isnan()

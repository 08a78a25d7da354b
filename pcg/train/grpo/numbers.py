"""Numbers of an update, by TRL's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pcg.train.grpo.advantages import Advantages, deviation
from pcg.train.grpo.objective import Objective
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import Rollout

Numbers = dict[str, float]


def reward_numbers(rewards: Tensor, names: Sequence[str], found: Advantages) -> Numbers:
    """Return means and deviations of the rewards of a generation, [completions, functions]."""
    numbers: Numbers = {}
    for name, column in zip(names, rewards.T, strict=True):
        numbers[f"rewards/{name}/mean"] = float(column.nanmean())
        numbers[f"rewards/{name}/std"] = float(deviation(column, 0))
    numbers["reward"] = float(found.rewards.nanmean())
    numbers["reward_std"] = float(deviation(found.rewards, 0))
    numbers["frac_reward_zero_std"] = float(found.is_flat.double().mean())
    return numbers


def length_numbers(rollouts: Sequence[Rollout]) -> Numbers:
    """Return lengths of the completions of a generation, in tokens, and the entropy.

    The entropy is estimated: the mean of -log p over the tokens that were sampled.
    """
    lengths = [len(one.tokens) for one in rollouts]
    ended = [len(one.tokens) for one in rollouts if one.has_ended]
    logprobs = [x for one in rollouts for x in one.logprobs]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "completions/mean_terminated_length": sum(ended) / len(ended) if ended else 0.0,
        "entropy": -sum(logprobs) / len(logprobs),
    }


def update_numbers(objective: Objective, found: Sequence[Tensor], options: GrpoOptions) -> Numbers:
    """Return clip ratios and the KL divergence of an update, and how far ratios were from 1.

    Args:
        found: the log-probabilities of data before the update.
    """
    logprobs = objective.of_completions(found)
    terms = objective.terms(logprobs)
    tokens = sum(len(one.tokens) for one in objective.rollouts if one.counts)
    low = (terms.ratios < options.low) & (objective.advantages < 0)
    high = (terms.ratios > options.high) & (objective.advantages > 0)

    def mean(x: Tensor) -> float:
        return float(x.double().sum()) / max(tokens, 1)

    if options.loss_type == "cispo":
        numbers = {"cispo_clip_ratio": mean(high)}
    else:
        numbers = {
            "clip_ratio/low_mean": mean(low),
            "clip_ratio/high_mean": mean(high),
            "clip_ratio/region_mean": mean(low | high),
        }
    if terms.divergences is not None:
        numbers["kl"] = mean(terms.divergences)
    sampled = torch.tensor([x for one in objective.trained for x in one.logprobs])
    gaps = (logprobs - sampled.double()).abs()
    numbers["sampling/sampling_logp_difference/mean"] = float(gaps.mean())
    numbers["sampling/sampling_logp_difference/max"] = float(gaps.max())
    return numbers


def finite(numbers: Mapping[str, float]) -> Numbers:
    """Return the numbers without those that are undefined, as the deviation of one reward."""
    return {name: float(x) for name, x in numbers.items() if math.isfinite(x)}

"""The numbers of GRPO: advantages of completions, the loss of an update, and the reported metrics.

Advantages compare a completion's reward with the rewards of its group. With the rewards R
[completions, functions] and their weights w, r = Σ_f w_f R_f of each completion, the mean μ over
its group and the deviation σ (with Bessel's correction) over the group or the batch:

    sum_then_normalize   A = (r - μ) / (σ + 1e-4), or r - μ without scaling
    normalize_then_sum   z_f = (R_f - μ_f) / (σ_f + 1e-4) in each group, r = Σ_f w_f z_f,
                         A = (r - mean of the batch) / (deviation of the batch + 1e-4)

A reward of NaN means that the function did not score the completion. A completion that no function
scored has the advantage 0 and is excluded from means.

The loss: with the log-probability l of a token, q at the time of sampling, p by the reference, and
the advantage A of its completion; over the n tokens of the completions of an update:

    r = exp(l - q), or exp(mean of l - q over the completion) at the sequence level
    cispo   t = -stop_gradient(min(r, epsilon_high)) A l
    else    t = -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
    k = exp(p - l) - (p - l) - 1, times r with use_bias_correction_kl
    loss = Σ w (t + beta k)

and w by `loss_type`, for B completions of n_i tokens each:

    dapo, cispo   1 / (tokens of the generation / updates that share it)
    bnpo          1 / Σ n_i
    grpo          1 / (B n_i)
    dr_grpo       1 / (B max_completion_length)

Masked completions have n_i = 0 and count in B. Numbers have TRL's names. Source: TRL 1.16,
GRPOTrainer and its _compute_loss, which tests/train/grpo restates for autograd.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pcg.runtime.training.trainer.datum import Datum
from pcg.train.grpo.options import GrpoOptions, ObjectiveOptions
from pcg.train.grpo.rollouts import Rollout, tokens_of

_EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Advantages of completions, with their rewards.

    Attributes:
        values: the advantage of each completion, [completions], fp64.
        rewards: the weighted sum of rewards of each completion; NaN without a score.
        is_flat: True for completions with a deviation of 0, which have no effect.
    """

    values: Tensor
    rewards: Tensor
    is_flat: Tensor


def advantages_of(
    rewards: Tensor, weights: Tensor, group: int, options: ObjectiveOptions
) -> Advantages:
    """Compute the advantages of completions.

    Args:
        rewards: [completions, functions], fp64; rows of a group are adjacent.
        weights: [functions].
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
    """Return the deviation along a kept dimension, with Bessel's correction, ignoring NaN.

    The deviation of fewer than two numbers is NaN.
    """
    count = (~x.isnan()).sum(dim=dim, keepdim=True)
    squares = (x - x.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / (count - 1)).where(count > 1, torch.nan).sqrt()


NamedLoss = tuple[str | Callable[[Sequence[Tensor]], Tensor], dict[str, float] | None]


@dataclass(frozen=True)
class TokenTerms:
    """Numbers of the trained completions' tokens, concatenated: [T], fp64.

    Attributes:
        ratios: r of each token; at the sequence level, r of its completion.
        divergences: k of each token; None without a reference.
    """

    ratios: Tensor
    losses: Tensor
    divergences: Tensor | None


class UpdateLoss:
    """The loss of the completions of an update.

    Attributes:
        trained: the completions to run through the model; a completion with neither an advantage
            nor a KL divergence has a gradient of 0, and is left out.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], options: GrpoOptions, generation_tokens: int
    ) -> None:
        """Create the loss of an update.

        Args:
            generation_tokens: tokens of all unmasked completions of the generation.
        """
        self.rollouts = rollouts
        self._options = options
        self._share = generation_tokens / options.steps_per_generation
        self.trained = [
            rollout
            for rollout in rollouts
            if rollout.counts and (rollout.advantage != 0.0 or options.beta)
        ]

    def data(self) -> list[Datum]:
        """Return the data of the update: prompts with their completions.

        Without trained completions, the data is a single completion with weight 0, so that the
        update still applies Adam's momentum.
        """
        chosen = self.trained or [min(self.rollouts, key=lambda rollout: len(rollout.tokens))]
        return [self._datum(rollout) for rollout in chosen]

    def _datum(self, rollout: Rollout) -> Datum:
        datum, count = rollout.datum, len(rollout.tokens)
        before = len(rollout.prompt_ids) - 1
        if not self.trained:
            weights = [0.0] * (before + count)
            return dataclasses.replace(datum, weights=weights, routed_experts=None)
        if self.is_function:
            return datum

        def column(values: Sequence[float]) -> list[float]:
            return [*[0.0] * before, *values]

        return dataclasses.replace(
            datum,
            weights=column([self._weight(rollout)] * count),
            advantages=column([rollout.advantage] * count),
            logprobs=column(rollout.logprobs),
        )

    def loss(self) -> NamedLoss:
        """Return the name and options of the equivalent trainer's loss, or a loss function."""
        options = self._options
        if not self.trained:
            return "cross_entropy", None
        if self.is_function:
            return self.evaluate, None
        name = "ppo" if options.importance_sampling_level == "token" else "gspo"
        name = "cispo" if options.loss_type == "cispo" else name
        return name, {"clip_low_threshold": options.low, "clip_high_threshold": options.high}

    @property
    def is_function(self) -> bool:
        """True if the trainer has no equivalent loss; a function needs a second forward."""
        options = self._options
        is_other_cispo = (
            options.loss_type == "cispo" and options.importance_sampling_level == "sequence"
        )
        return bool(options.beta) or options.delta is not None or is_other_cispo

    def _weight(self, rollout: Rollout) -> float:
        options, count = self._options, len(self.rollouts)
        if options.loss_type in ("dapo", "cispo"):
            return 1.0 / max(self._share, 1.0)
        if options.loss_type == "bnpo":
            return 1.0 / max(
                sum(len(rollout.tokens) for rollout in self.rollouts if rollout.counts), 1
            )
        if options.loss_type == "grpo":
            return 1.0 / (count * len(rollout.tokens))
        return 1.0 / (count * options.max_completion_length)

    # ------------------------------------------------------------------------------- by torch

    @cached_property
    def _lengths(self) -> Tensor:
        return torch.tensor([len(rollout.tokens) for rollout in self.trained])

    def _column(self, values: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([x for row in values for x in row], dtype=torch.float64)

    def _of_each(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(self._lengths)

    @cached_property
    def _sampled(self) -> Tensor:
        return self._column([rollout.logprobs for rollout in self.trained])

    @cached_property
    def advantages(self) -> Tensor:
        """The advantage of each trained token, [T]."""
        return self._of_each([rollout.advantage for rollout in self.trained])

    def of_completions(self, logprobs_of_data: Sequence[Tensor]) -> Tensor:
        """Return the log-probabilities of trained tokens, [T], from log-probabilities of data."""
        parts = zip(logprobs_of_data, self.trained, strict=True)
        return torch.cat([values[-len(rollout.tokens) :] for values, rollout in parts]).double()

    def evaluate(self, logprobs_of_data: Sequence[Tensor]) -> Tensor:
        """Return the differentiable loss of the log-probabilities of data, [N] each."""
        terms = self.terms(self.of_completions(logprobs_of_data))
        each = terms.losses
        if terms.divergences is not None:
            each = each + self._options.beta * terms.divergences
        return (self._of_each([self._weight(rollout) for rollout in self.trained]) * each).sum()

    def terms(self, logprobs: Tensor) -> TokenTerms:
        """Return the terms of trained tokens by their log-probabilities, [T]."""
        options, advantages = self._options, self.advantages
        changes = logprobs - self._sampled
        if options.importance_sampling_level == "sequence":
            parts = changes.split(self._lengths.tolist())
            means = torch.stack([part.mean() for part in parts])
            changes = means.repeat_interleave(self._lengths)
        ratios = changes.exp()
        if options.loss_type == "cispo":
            losses = -ratios.detach().clamp(max=options.high) * advantages * logprobs
        else:
            near = ratios.clamp(options.low, options.high)
            far = ratios if options.delta is None else ratios.clamp(max=options.delta)
            losses = -torch.minimum(far * advantages, near * advantages)
        divergences = None
        if options.beta:
            gaps = self._column([rollout.reference or () for rollout in self.trained]) - logprobs
            divergences = gaps.exp() - gaps - 1
            if options.use_bias_correction_kl:
                divergences = divergences * ratios
        return TokenTerms(ratios, losses, divergences)


Numbers = dict[str, float]


def reward_numbers(rewards: Tensor, names: Sequence[str], logprobs_of_data: Advantages) -> Numbers:
    """Return means and deviations of the rewards of a generation, [completions, functions]."""
    numbers: Numbers = {}
    for name, column in zip(names, rewards.T, strict=True):
        numbers[f"rewards/{name}/mean"] = float(column.nanmean())
        numbers[f"rewards/{name}/std"] = float(deviation(column, 0))
    numbers["reward"] = float(logprobs_of_data.rewards.nanmean())
    numbers["reward_std"] = float(deviation(logprobs_of_data.rewards, 0))
    numbers["frac_reward_zero_std"] = float(logprobs_of_data.is_flat.double().mean())
    return numbers


def length_numbers(rollouts: Sequence[Rollout]) -> Numbers:
    """Return lengths of the completions of a generation, in tokens, and the entropy.

    The entropy is estimated by the mean of -log p over the sampled tokens.
    """
    lengths = [len(rollout.tokens) for rollout in rollouts]
    ended = [len(rollout.tokens) for rollout in rollouts if rollout.has_ended]
    logprobs = [x for rollout in rollouts for x in rollout.logprobs]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "completions/mean_terminated_length": sum(ended) / len(ended) if ended else 0.0,
        "entropy": -sum(logprobs) / len(logprobs),
    }


def update_numbers(loss: UpdateLoss, before: Sequence[Tensor], options: GrpoOptions) -> Numbers:
    """Return clip ratios, KL divergence and differences from sampling logprobs of an update."""
    logprobs = loss.of_completions(before)
    terms = loss.terms(logprobs)
    tokens = tokens_of(loss.rollouts)
    low = (terms.ratios < options.low) & (loss.advantages < 0)
    high = (terms.ratios > options.high) & (loss.advantages > 0)

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
    sampled = torch.tensor([x for rollout in loss.trained for x in rollout.logprobs])
    gaps = (logprobs - sampled.double()).abs()
    numbers["sampling/sampling_logp_difference/mean"] = float(gaps.mean())
    numbers["sampling/sampling_logp_difference/max"] = float(gaps.max())
    return numbers


def finite(numbers: Mapping[str, float]) -> Numbers:
    """Return the defined numbers; the deviation of a single reward is undefined."""
    return {name: float(x) for name, x in numbers.items() if math.isfinite(x)}

"""The objective of GRPO: the loss of completions' tokens, and what trains it.

With the log-probability l of a token, q when it was sampled, p of the reference, and the advantage
A of its completion; over the n tokens of the completions of an update:

    r = exp(l - q), or exp(mean of l - q over the completion) at the level of sequences
    cispo   t = -stop_gradient(min(r, epsilon_high)) A l
    else    t = -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
    k = exp(p - l) - (p - l) - 1, times r with use_bias_correction_kl
    loss = Σ w (t + beta k)

and w by `loss_type`, for B completions of n_i tokens each:

    dapo, cispo   1 / (tokens of the generation / updates that share it)
    bnpo          1 / Σ n_i
    grpo          1 / (B n_i)
    dr_grpo       1 / (B max_completion_length)

Masked completions have n_i = 0 and count in B. Source: TRL 1.16, GRPOTrainer._compute_loss, which
tests/train/grpo/test_objective.py writes down for autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pcg.runtime.data.example import IGNORED
from pcg.runtime.training.trainer.datum import Datum
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import Rollout

NamedLoss = tuple[str | Callable[[Sequence[Tensor]], Tensor], dict[str, float] | None]


@dataclass(frozen=True)
class TokenTerms:
    """Numbers of the trained completions' tokens, one completion after the other: [T], fp64.

    Attributes:
        ratios: r of each token; at the level of sequences, that of its completion.
        losses: t of each token.
        divergences: k of each token; None without a reference.
    """

    ratios: Tensor
    losses: Tensor
    divergences: Tensor | None


class Objective:
    """The loss of the completions of an update.

    Attributes:
        rollouts: the completions.
        trained: those that can change the adapter: what has no advantage and no KL divergence has
            a gradient of 0, and does not go through the model.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], options: GrpoOptions, generation_tokens: int
    ) -> None:
        """Begin an update.

        Args:
            rollouts: the completions of the update, at least one.
            generation_tokens: tokens of all completions of the generation, masked ones left out.
        """
        self.rollouts = rollouts
        self._options = options
        self._share = generation_tokens / options.steps_per_generation
        self.trained = [
            one for one in rollouts if one.counts and (one.advantage != 0.0 or options.beta)
        ]

    def data(self) -> list[Datum]:
        """Return what goes through the model: prompts with their completions.

        Where nothing is to be learnt it is one completion without weight, so that the update, in
        which Adam's momentum goes on, is taken as any other.
        """
        chosen = self.trained or [min(self.rollouts, key=lambda one: len(one.tokens))]
        return [self._datum(one) for one in chosen]

    def _datum(self, one: Rollout) -> Datum:
        ids = [*one.prompt_ids, *one.tokens]
        before, count = len(one.prompt_ids) - 1, len(one.tokens)
        targets = [*[IGNORED] * before, *one.tokens]
        if not self.trained:
            return Datum(ids[:-1], targets, weights=[0.0] * len(targets))
        if self.is_function:
            return Datum(ids[:-1], targets)

        def column(values: Sequence[float]) -> list[float]:
            return [*[0.0] * before, *values]

        return Datum(
            ids[:-1],
            targets,
            weights=column([self._weight(one)] * count),
            advantages=column([one.advantage] * count),
            logprobs=column(one.logprobs),
        )

    def loss(self) -> NamedLoss:
        """Return the trainer's loss that this is, with its options, or a function."""
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
        """True if no loss of the trainer is this one: it costs a forward pass more."""
        options = self._options
        is_other_cispo = (
            options.loss_type == "cispo" and options.importance_sampling_level == "sequence"
        )
        return bool(options.beta) or options.delta is not None or is_other_cispo

    def _weight(self, one: Rollout) -> float:
        options, count = self._options, len(self.rollouts)
        if options.loss_type in ("dapo", "cispo"):
            return 1.0 / max(self._share, 1.0)
        if options.loss_type == "bnpo":
            return 1.0 / max(sum(len(one.tokens) for one in self.rollouts if one.counts), 1)
        if options.loss_type == "grpo":
            return 1.0 / (count * len(one.tokens))
        return 1.0 / (count * options.max_completion_length)

    # ------------------------------------------------------------------------------- by torch

    @cached_property
    def _lengths(self) -> Tensor:
        return torch.tensor([len(one.tokens) for one in self.trained])

    def _column(self, values: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([x for one in values for x in one], dtype=torch.float64)

    def _of_each(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(self._lengths)

    @cached_property
    def _sampled(self) -> Tensor:
        return self._column([one.logprobs for one in self.trained])

    @cached_property
    def advantages(self) -> Tensor:
        """The advantage of each trained token, [T]."""
        return self._of_each([one.advantage for one in self.trained])

    def of_completions(self, found: Sequence[Tensor]) -> Tensor:
        """Return the log-probabilities of trained tokens, [T], from those of data."""
        parts = zip(found, self.trained, strict=True)
        return torch.cat([values[-len(one.tokens) :] for values, one in parts]).double()

    def evaluate(self, found: Sequence[Tensor]) -> Tensor:
        """Return the loss of the log-probabilities of data, [N] each; differentiable."""
        terms = self.terms(self.of_completions(found))
        each = terms.losses
        if terms.divergences is not None:
            each = each + self._options.beta * terms.divergences
        return (self._of_each([self._weight(one) for one in self.trained]) * each).sum()

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
            gaps = self._column([one.reference or () for one in self.trained]) - logprobs
            divergences = gaps.exp() - gaps - 1
            if options.use_bias_correction_kl:
                divergences = divergences * ratios
        return TokenTerms(ratios, losses, divergences)

"""The loop of GRPO: generations are sampled and scored, and the adapter is updated by them.

With U updates by each generation and a staleness of s, generation g is submitted once g U - s
updates are done, with the weights as they are then. So with s = 0 it waits for all updates before
its own; from s = 1 on, its completions are sampled in the steps that train on those before it.

Numbers of an update, by TRL's names.

Advantages: how much better a completion's reward is than those of its group.

With the rewards R [completions, functions] and their weights w, r = Σ_f w_f R_f of each completion,
the mean μ over its group and the deviation σ (Bessel's) over the group or the batch:

    sum_then_normalize   A = (r - μ) / (σ + 1e-4), or r - μ without scaling
    normalize_then_sum   z_f = (R_f - μ_f) / (σ_f + 1e-4) in each group, r = Σ_f w_f z_f,
                         A = (r - mean of the batch) / (deviation of the batch + 1e-4)

NaN is no reward: the function did not score the completion. One that no function scored has the
advantage 0 and is in no mean. Source: TRL 1.16, GRPOTrainer; its tests are against that formula.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.peft.adapter import Adapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.trainers.async_trainer import AsyncTrainer
from pcg.runtime.training.options import make_schedule
from pcg.runtime.training.trainer.datum import Snapshot
from pcg.train.grpo.objective import Objective
from pcg.train.grpo.options import GrpoOptions, ObjectiveOptions
from pcg.train.grpo.prompts import Prompt, in_order
from pcg.train.grpo.result import GrpoResult, Sample
from pcg.train.grpo.rewards import Rewards, Scored
from pcg.train.grpo.rollouts import (
    Generation,
    Rollout,
    columns_of,
    generate,
    tokens_of,
    with_reference,
)

# --------------------------------------------------------------------------------------- advantages


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


# --------------------------------------------------------------------------------------------- loop


# ------------------------------------------------------------------------------------------ numbers


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


# --------------------------------------------------------------------------------------------- loop


_LOG = logging.getLogger("pcg.finetuning")
OnStep = Callable[[int, Mapping[str, float], Sequence[Sample]], object]
_SHOWN_SAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Task:
    """The things that a run learns from.

    Attributes:
        prompts: the prompts.
        rewards: the functions that score completions.
        reference: the version that the KL divergence is from; None for the base.
        on_step: called after each update with its number from 1, its numbers, and samples of a
            generation where it is the first update by it; None for nothing.
        updates: updates that the adapter has had already, by whole generations; the run goes on
            as one from the beginning would have.
        tokens: tokens of these updates.
    """

    prompts: Sequence[Prompt]
    rewards: Rewards
    reference: Adapter | None
    on_step: OnStep | None
    updates: int = 0
    tokens: int = 0


class GrpoLoop:
    """A run of GRPO over an engine on a thread."""

    def __init__(
        self, running: AsyncEngine, trainer: AsyncTrainer, task: Task, options: GrpoOptions
    ) -> None:
        self._running, self._trainer = running, trainer
        self._task, self._options = task, options
        self._order: Iterator[Prompt] = in_order(
            task.prompts, shuffle=options.shuffle, seed=options.seed
        )
        self.total = total_updates(len(task.prompts), options)
        self._rate = make_schedule(
            options.lr_scheduler_type,
            total_steps=self.total,
            warmup_steps=options.warmup_steps or None,
        )
        self._updates = task.updates
        self._submitted = task.updates // options.updates_per_generation
        passed = self._submitted * options.prompts_per_generation
        next(itertools.islice(self._order, passed, passed), None)
        self._tokens = task.tokens
        self._waiting: deque[Generation] = deque()
        self._snapshot: Snapshot | None = None
        self._history: list[Numbers] = []
        self._samples: list[Sample] = []

    def run(self) -> GrpoResult:
        """Run to the end; what fails or is interrupted leaves nothing running."""
        began = time.monotonic()
        try:
            recipe = self._published().adapter.recipe
            if recipe.dropout:
                _LOG.warning(
                    "%s: %s=%g is not applied, as updates compare log-probabilities with those of "
                    "sampling, which drops nothing",
                    *(self._trainer.name, recipe.dropout_field, recipe.dropout),
                )
            while self._updates < self.total:
                self._submit()
                self._train(self._waiting.popleft())
            snapshot = self._published()
        finally:
            for one in self._waiting:
                one.cancel()
        return GrpoResult(
            self._trainer.name,
            self._updates,
            self._history,
            self._samples,
            snapshot,
            time.monotonic() - began,
        )

    # ------------------------------------------------------------------------------- rollouts

    def _submit(self) -> None:
        """Submit the generations that may be sampled by the weights as they are."""
        options = self._options
        each = options.updates_per_generation
        while (first := self._submitted * each) < self.total:
            if first - options.max_staleness > self._updates:
                return
            adapter = self._published().adapter
            prompts = list(itertools.islice(self._order, options.prompts_per_generation))
            self._waiting.append(
                generate(self._running, adapter, self._submitted, prompts, options, self._updates)
            )
            self._submitted += 1

    def _published(self) -> Snapshot:
        """Return a version of the weights as they are."""
        if self._snapshot is None:
            self._snapshot = self._trainer.snapshot().wait()
        return self._snapshot

    def _scored(self, rollouts: list[Rollout]) -> tuple[list[Rollout], Numbers]:
        """Return rollouts with their advantages, and the numbers of the generation."""
        task, options = self._task, self._options
        if options.beta:
            rollouts = with_reference(self._running, task.reference, rollouts)
        scored = Scored(
            [one.prompt.given for one in rollouts],
            [one.prompt.completion(one.text) for one in rollouts],
            [one.tokens for one in rollouts],
            columns_of(rollouts),
        )
        state = {"global_step": self._updates, "max_steps": self.total}
        rewards = task.rewards.score(scored, state)
        if rewards.isnan().all():
            _LOG.warning(
                "update %s: no reward function scored any of %s completions, which teach nothing",
                self._updates + 1,
                len(rollouts),
            )
        found = advantages_of(rewards, task.rewards.weights, options.num_generations, options)
        rollouts = [
            dataclasses.replace(one, advantage=value)
            for one, value in zip(rollouts, found.values.tolist(), strict=True)
        ]
        self._sample(rollouts, rewards)
        numbers = reward_numbers(rewards, task.rewards.names, found) | length_numbers(rollouts)
        return rollouts, numbers

    def _sample(self, rollouts: Sequence[Rollout], rewards: Tensor) -> None:
        names = self._task.rewards.names
        chosen = zip(rollouts[:_SHOWN_SAMPLES], rewards.tolist(), strict=False)
        self._samples = [
            Sample(
                self._updates + 1,
                one.prompt.given,
                one.text,
                {name: None if x != x else x for name, x in zip(names, row, strict=True)},
                one.advantage,
            )
            for one, row in chosen
        ]

    # ------------------------------------------------------------------------------- updates

    def _train(self, generation: Generation) -> None:
        """Update the adapter by a generation."""
        options = self._options
        began = time.monotonic()
        rollouts = generation.wait(options.mask_truncated_completions)
        rollouts, numbers = self._scored(rollouts)
        numbers["staleness"] = self._updates - generation.updates
        numbers["generation_s"] = time.monotonic() - began
        generation_tokens = tokens_of(rollouts)
        random.Random(f"{options.seed} {generation.number}").shuffle(rollouts)
        size = options.batch_size
        parts = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
        for part in parts * options.num_iterations:
            if self._updates == self.total:
                return
            done = self._update(Objective(part, options, generation_tokens))
            self._tell({**numbers, **done})
            self._submit()

    def _update(self, objective: Objective) -> Numbers:
        options = self._options
        began = time.monotonic()
        loss, loss_options = objective.loss()
        forward = self._trainer.forward_backward(objective.data(), loss, loss_options=loss_options)
        rate = options.learning_rate * self._rate(self._updates)
        update = self._trainer.optim_step(
            learning_rate=rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
            grad_clip_norm=options.max_grad_norm,
        )
        scored = forward.wait()
        done = update.wait()
        self._snapshot = None
        self._updates += 1
        self._tokens += scored.tokens
        numbers = {"loss": scored.loss, "grad_norm": done.gradient_norm, "learning_rate": rate}
        if objective.trained:
            numbers |= update_numbers(objective, scored.logprobs, options)
        numbers["num_tokens"] = self._tokens
        numbers["update_s"] = time.monotonic() - began
        return numbers

    def _tell(self, numbers: Numbers) -> None:
        numbers = finite(numbers)
        self._history.append(numbers)
        if self._task.on_step is not None:
            is_first = not self._samples or self._samples[0].step == self._updates
            self._task.on_step(self._updates, numbers, self._samples if is_first else ())


def total_updates(prompts: int, options: GrpoOptions) -> int:
    """Return the number of updates of a run."""
    if options.max_steps is not None:
        return options.max_steps
    generations = int(options.num_train_epochs * prompts / options.prompts_per_generation)
    return max(generations, 1) * options.updates_per_generation

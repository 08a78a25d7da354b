"""The loop of GRPO, an objective of `pcg.runtime.training.run`: sample, score, update.

With U updates per generation and a staleness of s, generation g is submitted after g U - s updates,
with the current weights. With s = 0, a generation waits for all earlier updates; with s ≥ 1, its
completions are sampled in the steps that train on earlier completions.

Prompts, seeds and the schedule are functions of the number of updates, so a resumed run has the
same ones as an uninterrupted run. Completions in flight are not saved, so checkpoints are written
after whole generations; with a staleness above 0, completions are sampled again by later weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pcg.peft.adapter import Adapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.trainers import AsyncTrainer
from pcg.runtime.training.callbacks import Listeners
from pcg.runtime.training.checkpoints import TrainerState
from pcg.runtime.training.options import Numbers, RunOptions, StepRecord
from pcg.runtime.training.run import Find, Run, StepNumbers
from pcg.runtime.training.schedules import make_schedule
from pcg.runtime.training.trainer.datum import Snapshot
from pcg.runtime.training.trainer.trainer import Trainer, TrainerObjective
from pcg.runtime.training.work_units import Work
from pcg.train.grpo.objective import (
    UpdateLoss,
    advantages_of,
    finite,
    length_numbers,
    reward_numbers,
    update_numbers,
)
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.rollouts import (
    Generation,
    Prompt,
    Rewards,
    Rollout,
    Scored,
    columns_of,
    generate,
    greedy_rollouts,
    in_order,
    tokens_of,
    with_reference,
)

_LOG = logging.getLogger("pcg.finetuning")
_SHOWN_SAMPLES = 8


@dataclass(frozen=True)
class Sample:
    """A completion with its scores.

    Attributes:
        step: number of the first update that used the completion, from 1.
        prompt: the prompt in the data's form.
        completion: the text.
        rewards: the reward of each function by name; None for a function that did not score.
        advantage: the advantage.
    """

    step: int
    prompt: Any
    completion: str
    rewards: Mapping[str, float | None]
    advantage: float

    @property
    def row(self) -> dict[str, object]:
        """The row in a record's table; a single function's reward has the name "reward"."""
        values = list(self.rewards.values())
        rewards = dict(self.rewards) if len(values) > 1 else {"reward": values[0]}
        return {
            "prompt": self.prompt,
            "completion": self.completion,
            **rewards,
            "advantage": self.advantage,
        }


OnStep = Callable[[int, Mapping[str, float], Sequence[Sample]], object]


@dataclass(frozen=True)
class GrpoResult:
    """The result of a run.

    Attributes:
        adapter: the adapter's name.
        steps: number of updates.
        history: the numbers of each update, by TRL's names (docs/finetuning.md).
        samples: a few completions of the last generation.
        snapshot: the published version.
        seconds: time of the run.
    """

    adapter: str
    steps: int
    history: Sequence[Mapping[str, float]] = field(repr=False)
    samples: Sequence[Sample] = field(repr=False)
    snapshot: Snapshot
    seconds: float


@dataclass(frozen=True)
class Task:
    """The task of a run.

    Attributes:
        prompts: the prompts.
        rewards: the functions that score completions.
        reference: the reference version of the KL divergence; None for the base.
        on_step: function to call after each update with its number (from 1), its numbers and, for
            the first update by a generation, samples; or None.
        tests: the prompts of evaluations; none without evaluations.
        updates: number of earlier updates of the adapter, in whole generations; the run continues
            as a single run would.
        callbacks: objects with methods of `pcg.TrainingCallback`.
    """

    prompts: Sequence[Prompt]
    rewards: Rewards
    reference: Adapter | None
    on_step: OnStep | None
    tests: Sequence[Prompt] = ()
    updates: int = 0
    callbacks: Sequence[Any] = ()


def grpo_run(
    running: AsyncEngine,
    trainer: AsyncTrainer,
    task: Task,
    options: GrpoOptions,
    run_options: RunOptions | None = None,
    trajectory: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run[GrpoResult]:
    """Create a run of GRPO over an async engine.

    Args:
        run_options: checkpoints and the record; None without them.
    """
    objective = GrpoObjective(running, trainer, task, options)
    schedule = make_schedule(
        options.lr_scheduler_type,
        total_steps=objective.total,
        warmup_steps=options.warmup_steps or None,
    )

    def on_step(record: StepRecord) -> None:
        if task.on_step is not None:
            task.on_step(record.step, record.metrics, objective.new_samples)

    return Run(
        objective,
        RunOptions(progress=False) if run_options is None else run_options,
        total=objective.total,
        rate=lambda step: options.learning_rate * schedule(step),
        trajectory={} if trajectory is None else trajectory,
        config=lambda: {} if config is None else config,
        listeners=Listeners(on_step, task.callbacks, options),
        begun=TrainerState(step=task.updates),
    )


class GrpoObjective(TrainerObjective[GrpoResult]):
    """Reinforcement learning by GRPO: samples and scores generations, and updates the adapter.

    Attributes:
        new_samples: samples of a generation after the first update by it; else empty.
    """

    kind = "grpo"
    saves_interrupted = False

    def __init__(
        self, running: AsyncEngine, trainer: AsyncTrainer, task: Task, options: GrpoOptions
    ) -> None:
        super().__init__(trainer.name)
        self.doing = f"training {self.name!r} by GRPO"
        self._running, self._trainer = running, trainer
        self.trainer = Trainer(self.name, lambda command: trainer.run(command).wait(), _nothing)
        self._task, self._options = task, options
        self._order: Iterator[Prompt] = in_order(
            task.prompts, shuffle=options.shuffle, seed=options.seed
        )
        self.total = total_updates(len(task.prompts), options)
        self._updates = self._submitted = self._tokens = 0
        self._waiting: deque[Generation] = deque()
        self._parts: deque[list[Rollout]] = deque()
        self._generation_tokens = 0
        self._generation_numbers: Numbers = {}
        self._snapshot: Snapshot | None = None
        self._samples: list[Sample] = []
        self.new_samples: Sequence[Sample] = ()

    def start(self, find: Find) -> None:
        options, checkpoint = self._options, find()
        self.load(checkpoint)
        state = TrainerState(step=self._task.updates) if checkpoint is None else checkpoint[1].state
        self._updates, self._tokens = state.step, state.tokens
        self._submitted = self._updates // options.updates_per_generation
        passed = self._submitted * options.prompts_per_generation
        next(itertools.islice(self._order, passed, passed), None)
        recipe = self._published().adapter.recipe
        if recipe.dropout:
            _LOG.warning(
                "%s: %s=%g is not applied, as updates compare log-probabilities with those of "
                "sampling, which drops nothing",
                *(self.name, recipe.dropout_field, recipe.dropout),
            )

    def position(self) -> dict[str, Any]:
        return {}

    def finish(self, run: Run[GrpoResult]) -> Work[GrpoResult]:
        yield from ()
        return GrpoResult(
            self.name,
            run.state.step,
            history=self.history,
            samples=self._samples,
            snapshot=self._published(),
            seconds=run.seconds,
        )

    def end(self) -> None:
        for generation in self._waiting:
            generation.cancel()

    def recorded(self, record: StepRecord) -> Numbers:
        return record.metrics

    def samples(self) -> Sequence[Mapping[str, object]]:
        return [sample.row for sample in self.new_samples]

    # ------------------------------------------------------------------------------- rollouts

    def _submit(self) -> None:
        """Submit the generations that the staleness allows to sample with the current weights."""
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
        """Return a published version of the current weights."""
        if self._snapshot is None:
            self._snapshot = self._trainer.snapshot().wait()
        return self._snapshot

    def _begin_generation(self) -> None:
        """Wait for the next generation, score it, and divide it among its updates."""
        options, generation = self._options, self._waiting.popleft()
        began = time.monotonic()
        rollouts = generation.wait(options.mask_truncated_completions)
        if options.temperature != 1:
            rollouts = self._at_temperature(rollouts)
        rollouts, numbers = self._scored(rollouts)
        numbers["staleness"] = self._updates - generation.updates
        numbers["generation_s"] = time.monotonic() - began
        self._generation_numbers = numbers
        self._generation_tokens = tokens_of(rollouts)
        random.Random(f"{options.seed} {generation.number}").shuffle(rollouts)
        size = options.batch_size
        parts = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
        self._parts = deque(parts * options.num_iterations)

    def _at_temperature(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return rollouts with the log-probabilities of the trainer, at its temperature."""
        data = [rollout.datum for rollout in rollouts]
        logprobs = self._trainer.forward(data).wait().logprobs
        return [
            dataclasses.replace(rollout, logprobs=tuple(values[-len(rollout.tokens) :].tolist()))
            for rollout, values in zip(rollouts, logprobs, strict=True)
        ]

    def _scored(self, rollouts: list[Rollout]) -> tuple[list[Rollout], dict[str, float]]:
        """Return rollouts with advantages, and the numbers of the generation."""
        task, options = self._task, self._options
        if options.beta:
            rollouts = with_reference(self._running, task.reference, rollouts)
        rewards = self._rewards_of(rollouts)
        if rewards.isnan().all():
            _LOG.warning(
                "update %s: no reward function scored any of %s completions; they have no effect",
                self._updates + 1,
                len(rollouts),
            )
        advantages = advantages_of(rewards, task.rewards.weights, options.num_generations, options)
        rollouts = [
            dataclasses.replace(rollout, advantage=value)
            for rollout, value in zip(rollouts, advantages.values.tolist(), strict=True)
        ]
        self._sample(rollouts, rewards)
        numbers = reward_numbers(rewards, task.rewards.names, advantages)
        return rollouts, numbers | length_numbers(rollouts)

    def _rewards_of(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return the reward of each rollout by each function, [rollouts, functions]."""
        scored = Scored(
            [rollout.prompt.content for rollout in rollouts],
            [rollout.prompt.completion(rollout.text) for rollout in rollouts],
            [rollout.tokens for rollout in rollouts],
            columns_of(rollouts),
        )
        state = {"global_step": self._updates, "max_steps": self.total}
        return self._task.rewards.score(scored, state)

    def _evaluated(self) -> dict[str, float]:
        """Return the mean rewards of greedy completions, if an evaluation is due."""
        task, every = self._task, self._options.eval_every
        is_last = self._updates == self.total
        if not task.tests or not (is_last or (every is not None and not self._updates % every)):
            return {}
        adapter = self._published().adapter
        rollouts = greedy_rollouts(self._running, adapter, task.tests, self._options)
        rewards = self._rewards_of(rollouts)
        sums = (rewards * task.rewards.weights).nansum(1)
        means = zip(task.rewards.names, rewards.nanmean(0).tolist(), strict=True)
        return {
            "eval_reward": float(sums.mean()),
            **{f"eval_rewards/{name}/mean": mean for name, mean in means},
            "eval_completions/mean_length": tokens_of(rollouts) / len(rollouts),
        }

    def _sample(self, rollouts: Sequence[Rollout], rewards: Tensor) -> None:
        names = self._task.rewards.names
        chosen = zip(rollouts[:_SHOWN_SAMPLES], rewards.tolist(), strict=False)
        self._samples = [
            Sample(
                self._updates + 1,
                rollout.prompt.content,
                rollout.text,
                {name: None if x != x else x for name, x in zip(names, row, strict=True)},
                rollout.advantage,
            )
            for rollout, row in chosen
        ]

    # ------------------------------------------------------------------------------- updates

    def gradients(self, step: int, rate: float) -> Work[None]:
        """Start the next update, and wait for its gradients."""
        yield from ()
        options = self._options
        self._submit()
        is_first = not self._parts
        if is_first:
            self._begin_generation()
        self.new_samples = self._samples if is_first else ()
        self._began = time.monotonic()
        self._loss = UpdateLoss(self._parts.popleft(), options, self._generation_tokens)
        loss, loss_options = self._loss.loss()
        forward = self._trainer.forward_backward(self._loss.data(), loss, loss_options=loss_options)
        self._update = self._trainer.optim_step(
            learning_rate=rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
            grad_clip_norm=options.max_grad_norm,
        )
        self._score = forward.wait()

    def update(self, step: int, rate: float) -> StepNumbers:
        score, stepped = self._score, self._update.wait()
        self._snapshot = None
        self._updates += 1
        self._tokens += score.tokens
        norm = stepped.gradient_norm
        numbers = {"loss": score.loss, "grad_norm": norm, "learning_rate": rate}
        if self._loss.trained:
            numbers |= update_numbers(self._loss, score.logprobs, self._options)
        numbers["num_tokens"] = self._tokens
        numbers["update_s"] = time.monotonic() - self._began
        numbers = finite({**self._generation_numbers, **numbers, **self._evaluated()})
        self.history.append(numbers)
        return StepNumbers(0, score.loss, norm, score.tokens, metrics=numbers)


def _nothing() -> None:
    """Leave the trainer open."""


def total_updates(prompts: int, options: GrpoOptions) -> int:
    """Return the number of updates of a run."""
    if options.max_steps is not None:
        return options.max_steps
    generations = int(options.num_train_epochs * prompts / options.prompts_per_generation)
    return max(generations, 1) * options.updates_per_generation

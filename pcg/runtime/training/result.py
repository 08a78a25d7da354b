"""The results of a finetuning job: a record of each step, and a summary at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepRecord:
    """One step, the argument of `on_step`.

    Attributes:
        step: number of the step, from 1.
        total_steps: number of steps of the job.
        epoch: epoch of the data, from 0.
        loss: mean over the step's target tokens, before its update.
        eval_loss: evaluation loss after its update, if it was evaluated.
        learning_rate: the learning rate of the step.
        gradient_norm: norm of the gradients before clipping.
        tokens: tokens that went through the model.
        tokens_per_second: mean since the job started or was resumed.
        checkpoint: the last checkpoint; None without one.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    eval_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    checkpoint: Path | None = None


OnStep = Callable[[StepRecord], None]

_COLLAPSE = math.log(2)


@dataclass(frozen=True)
class LossChange:
    """The loss at the beginning of a job and at its end, over more than one batch.

    Attributes:
        first: mean of the first tenth of the steps, or of five steps if these are more.
        last: mean of as many steps at the end.
        steps: the number of steps of each; they do not overlap.
    """

    first: float
    last: float
    steps: int

    @classmethod
    def of(cls, losses: Sequence[float]) -> LossChange:
        """Return the change over the losses of at least one step."""
        steps = max(1, math.ceil(len(losses) / 10), min(5, len(losses) // 2))
        return cls(sum(losses[:steps]) / steps, sum(losses[-steps:]) / steps, steps)


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a job, the part before it was resumed included.

    Attributes:
        adapter: the adapter's name.
        losses: mean loss of the target tokens, of each step.
        eval_losses: (step, mean loss) of each evaluation.
        steps: number of steps done.
        total_steps: number of steps planned.
        tokens: tokens that went through the model in steps.
        targets: target tokens among them.
        seconds: time spent.
        stopped: "completed", or "early" without improvement.
        best_step: step of the best evaluation; None without any.
        best_loss: loss of the best evaluation.
        restored: True if the adapter is that of `best_step`.
        resumed_from: step of the checkpoint that the job resumed from; None if from none.
        checkpoint: the last checkpoint.
        first_data: losses of the first step's data, before the job and by the adapter it ends with;
            None unless the loss of the steps rose, which other data may also be the cause of.
    """

    adapter: str
    losses: tuple[float, ...]
    eval_losses: tuple[tuple[int, float], ...]
    steps: int
    total_steps: int
    tokens: int
    targets: int
    seconds: float
    stopped: str
    best_step: int | None
    best_loss: float | None
    restored: bool
    resumed_from: int | None
    checkpoint: Path | None
    first_data: tuple[float, float] | None = None

    @property
    def is_collapsed(self) -> bool:
        """True if the job left data that it trained on with at least twice the perplexity."""
        return self.first_data is not None and self.first_data[1] - self.first_data[0] > _COLLAPSE

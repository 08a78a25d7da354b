"""The results of a finetuning job: a record of each step, and a summary at the end."""

from __future__ import annotations

from collections.abc import Callable
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


OnStep = Callable[[StepRecord], None]


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

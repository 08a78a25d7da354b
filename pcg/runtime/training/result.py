"""What a finetuning job tells: each step as it is done, and all of it at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepRecord:
    """One step, as `on_step` is told of it.

    Attributes:
        step: from 1.
        total_steps: of the job.
        epoch: of the data, from 0.
        loss: mean over the step's target tokens, before its update.
        eval_loss: after its update, where it was evaluated.
        learning_rate: that it used.
        gradient_norm: before clipping.
        tokens: that went through the model.
        tokens_per_second: since the job started or was resumed.
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
    """What a job did, the parts before it was resumed included.

    Attributes:
        adapter: its name.
        losses: mean loss of the target tokens, of each step.
        eval_losses: (step, mean loss) of each evaluation.
        steps: done.
        total_steps: that were planned.
        tokens: that went through the model in steps.
        targets: tokens among them that were learned.
        seconds: spent.
        stopped: "completed", or "early" for want of improvement.
        best_step: of the best evaluation; None without any.
        best_loss: of the best evaluation.
        restored: whether the adapter is the one of `best_step`.
        resumed_from: step of the checkpoint that the job went on from; None if from none.
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

"""Records of training on preferences: a step, and the whole run.

Metrics have TRL's names. With the sums of a pair's log-probabilities by the adapter, l, and by the
reference, q, over the targets of each output:

    logps/chosen, logps/rejected        l
    rewards/chosen, rewards/rejected    β (l - q)
    rewards/margins                     the chosen reward less the rejected one
    rewards/accuracies                  1 where that is above 0

and each is a mean over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class PreferenceStep:
    """One step, the argument of `on_step`.

    Attributes:
        step: number of the step, from 1.
        total_steps: number of steps of the run.
        epoch: epoch of the data, from 0.
        loss: mean over the step's pairs, before its update.
        metrics: those of the step's pairs, before its update.
        evaluation: `loss` and the metrics of the evaluation data after it, if it was evaluated.
        learning_rate: the learning rate of the step.
        gradient_norm: norm of the gradients before clipping.
        tokens: tokens that went through the model.
        tokens_per_second: mean since the run started or was resumed.
        checkpoint: the last checkpoint; None without one.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    metrics: Metrics
    evaluation: Metrics | None
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    checkpoint: Path | None = None


@dataclass(frozen=True)
class PreferenceResult:
    """The result of a run, the part before it was resumed included.

    Attributes:
        adapter: the adapter's name.
        history: `loss` and the metrics of each step.
        evaluations: (step, `loss` and metrics) of each evaluation.
        steps: number of steps done.
        total_steps: number of steps planned.
        tokens: tokens that went through the model in steps.
        seconds: time spent.
        resumed_from: step of the checkpoint that the run resumed from; None if from none.
        checkpoint: the last checkpoint.
    """

    adapter: str
    history: tuple[Metrics, ...]
    evaluations: tuple[tuple[int, Metrics], ...]
    steps: int
    total_steps: int
    tokens: int
    seconds: float
    resumed_from: int | None
    checkpoint: Path | None


def metrics_of(
    policy: Sequence[float], reference: Sequence[float], beta: float
) -> dict[str, float]:
    """Return the metrics of pairs.

    Args:
        policy: the summed log-probability of each output, chosen and rejected in turns.
        reference: the same by the reference.
    """
    rewards = [beta * (l - q) for l, q in zip(policy, reference, strict=True)]  # noqa: E741
    margins = [chosen - other for chosen, other in zip(rewards[::2], rewards[1::2], strict=True)]
    columns = {
        "rewards/chosen": rewards[::2],
        "rewards/rejected": rewards[1::2],
        "rewards/margins": margins,
        "rewards/accuracies": [float(margin > 0) for margin in margins],
        "logps/chosen": policy[::2],
        "logps/rejected": policy[1::2],
    }
    return {name: sum(values) / len(values) for name, values in columns.items()}

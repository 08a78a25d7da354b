"""Finetuning jobs that a server begins on its engine, and the news of them.

A job writes its checkpoints in a folder of its own before the news of a step goes out, and the
adapter that it ends with before the news of its end. So whatever was told is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

SUPERVISED, DPO, REINFORCEMENT = "supervised", "dpo", "reinforcement"
"""The methods of jobs: on examples, on preferences, and on rewards."""
TRAIN_REWARD, VALID_REWARD = "train_reward_mean", "valid_reward_mean"
"""Metrics of reinforcement."""


class JobOrder(msgspec.Struct, frozen=True):
    """A job that the engine is to run, or to go on with from its last checkpoint.

    Attributes:
        adapter: the engine's name of the adapter, and of the job.
        data: the training data; `eval_data` is None for a job that is not evaluated.
        peft: the recipe as of adapter_config.json.
        checkpoints: the folder of its checkpoints.
        output: the folder that will have the adapter.
        options: further options of `FinetuneOptions` or `DpoOptions`, or those of reinforcement.
        method: how it learns.
        start: the folder of the adapter that it goes on from; None for a new one of the recipe.
        tenant: the owner of the job.
    """

    adapter: str
    data: str
    eval_data: str | None
    peft: dict[str, Any]
    checkpoints: str
    output: str
    options: dict[str, Any]
    method: str = SUPERVISED
    start: str | None = None
    tenant: str = ""


class JobStep(msgspec.Struct, frozen=True, tag="step"):
    """A step that is done; the fields are those of `StepRecord`.

    Attributes:
        checkpoint: the name of the last checkpoint's folder; None without one.
        more: what the job's method tells beside these, by name.
    """

    step: int
    total_steps: int
    loss: float
    eval_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    checkpoint: str | None
    more: dict[str, float] = {}


class JobSamples(msgspec.Struct, frozen=True, tag="samples"):
    """Completions that the job waits to have graded, each with the row that it answers."""

    texts: list[str]
    items: list[dict[str, Any]]


class JobEnd(msgspec.Struct, frozen=True, tag="end"):
    """The end of a job, for now or for good.

    Attributes:
        state: how it ended.
        is_final: False for one that goes on from its checkpoint when it is ordered again: it was
            interrupted, or the engine ends.
        tokens: tokens that went through the model, of a job that succeeded.
        kind: the class of its error, and `text` what it says.
    """

    state: str
    is_final: bool
    tokens: int | None = None
    kind: str | None = None
    text: str | None = None


JobNews: TypeAlias = JobStep | JobSamples | JobEnd
Tell: TypeAlias = Callable[[JobNews], None]


def start_of(order: JobOrder) -> Any:
    """Return what the job's adapter begins as: a recipe, or a saved one."""
    return order.peft if order.start is None else Path(order.start)

"""The record of a finetuning job: its configuration, as it was resolved, and its steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_fields
from pcg.records.record import RunRecord
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.checkpoints import TrainerState
from pcg.runtime.training.options import FinetuneArguments, FinetuneOptions, JobArguments
from pcg.runtime.training.result import StepRecord

_LEFT_OUT = (
    "data",
    "eval_data",
    "on_step",
    "peft",
    "record",
    "report_to",
    "progress",
    "log_every",
    "resume",
)
"""Arguments that are not of the run's configuration, or stand in it as they were resolved."""


class JobRecord:
    """The record of a job, in the folder that the option `record` names."""

    def __init__(self, options: FinetuneArguments, config: Mapping[str, Any], device: str) -> None:
        self._options = options
        self._config = config
        self._device = torch.device(device)
        self._record: RunRecord | None = None

    def begin(self, state: TrainerState) -> None:
        """Open the record, and add the steps before a checkpoint that it does not have.

        Raises:
            RecordError: it cannot be written.
        """
        folder = self._options.record
        assert folder is not None
        self._record = record = RunRecord(
            folder,
            self._config,
            name=self._options.adapter,
            kind="finetune",
            done=state.step,
            report_to=self._options.report_to,
            waits_for_page=not isinstance(self._options, JobArguments),
        )
        evaluated = dict(state.eval_losses)
        for step in range(record.last_step + 1, state.step + 1):
            found = {"eval_loss": evaluated[step]} if step in evaluated else {}
            record.log(step, loss=state.losses[step - 1], **found)

    def evaluated(self, step: int, loss: float) -> None:
        """Add an evaluation to the last step, or before the first, unless that has it."""
        assert self._record is not None
        if "eval_loss" not in self._record.names_of_last:
            self._record.log(step, eval_loss=loss)

    def step(self, done: StepRecord) -> None:
        """Add a step. RecordError: it cannot be written."""
        assert self._record is not None
        numbers: dict[str, float] = {
            "epoch": done.epoch,
            "loss": done.loss,
            "learning_rate": done.learning_rate,
            "gradient_norm": done.gradient_norm,
            "tokens": done.tokens,
            "tokens_per_second": round(done.tokens_per_second, 3),
            "memory_bytes": memory_bytes(self._device),
        }
        if done.eval_loss is not None:
            numbers["eval_loss"] = done.eval_loss
        self._record.log(done.step, **numbers)

    def end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the record as the job ends."""
        if self._record is not None:
            self._record.__exit__(kind, error, trace)


def job_config(
    options: FinetuneArguments, model: ModelState, recipe: Recipe, facts: Mapping[str, object]
) -> dict[str, Any]:
    """Return the configuration of a job with what is automatic resolved.

    Args:
        recipe: that of the adapter.
        facts: what the job found: its steps, its examples.
    """
    optimizer = options.make_optimizer()
    names = [field.name for field in dataclasses.fields(FinetuneOptions)]
    given = {name: getattr(options, name) for name in names if name not in _LEFT_OUT}
    program = model.program
    return {
        "adapter": options.adapter,
        "model": program.name,
        "dtype": program.dtype,
        "device": str(model.device),
        "ranks": model.world.size,
        "data": _source(options.data),
        "eval_data": None if options.eval_data is None else _source(options.eval_data),
        **facts,
        **given,
        **options.batch_bounds,
        **optimizer.options,
        "optimizer": optimizer.name,
        "peft": recipe_fields(recipe),
    }


def _source(data: object) -> object:
    """Return the names of files, or the kind of data in memory."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, list | tuple) and data and all(isinstance(one, Path) for one in data):
        return [str(one) for one in data]
    return type(data).__name__


def memory_bytes(device: torch.device) -> int:
    """Return the most that torch has had on a GPU so far, or what is resident of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

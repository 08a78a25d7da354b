"""Reports of a job: the progress bar, lines in the log, and the record with each step's numbers."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_fields
from pcg.records.record import RunRecord
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.checkpoints import TrainerState
from pcg.runtime.training.options import (
    FinetuneArguments,
    FinetuneOptions,
    JobArguments,
    StepRecord,
)

# --------------------------------------------------------------------------------------- job record


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


# ------------------------------------------------------------------------------------------ reports


# ----------------------------------------------------------------------------------------- progress


class ProgressBar:
    """A bar on standard error; a silent one if that is no terminal, or none is wanted.

    Attributes:
        is_shown: False for a silent one.
    """

    def __init__(self, name: str, total: int, done: int, shown: bool) -> None:
        """Show a job of `total` steps, of which `done` were done before it was resumed."""
        from rich import progress
        from rich.console import Console

        self.is_shown = shown and sys.stderr.isatty()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]}"),
            progress.TextColumn("lr {task.fields[rate]}"),
            progress.TextColumn("{task.fields[speed]} tok/s"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self.is_shown,
        )
        self._task = self._progress.add_task(
            name, total=total, completed=done, loss="-", rate="-", speed="-"
        )

    def start(self) -> None:
        self._progress.start()

    def update(self, record: StepRecord) -> None:
        loss = f"{record.loss:.4f}"
        if record.eval_loss is not None:
            loss += f" (eval {record.eval_loss:.4f})"
        self._progress.update(
            self._task,
            completed=record.step,
            loss=loss,
            rate=f"{record.learning_rate:.2e}",
            speed=f"{record.tokens_per_second:,.0f}",
        )

    def close(self) -> None:
        self._progress.stop()


# ------------------------------------------------------------------------------------------ reports


_LOG = logging.getLogger("pcg.finetuning")
_LINE_S = 5.0
"""Time between lines of the log where no bar is shown, seconds."""


class Reports:
    """The bar, the log and the record of a job, from its first unit to its end."""

    def __init__(
        self,
        options: FinetuneArguments,
        total: int,
        state: TrainerState,
        record: JobRecord | None,
        is_first: bool,
    ) -> None:
        """Make the reports of a job.

        Args:
            total: number of steps of the job.
            state: the job's state, which its steps change.
            record: its record; None without one.
            is_first: True on the first rank; others say nothing.
        """
        self._options = options
        self._state = state
        self._record = record if is_first else None
        self._is_first = is_first
        self._logged = state.step
        self._next_line_s = 0.0
        self._bar = ProgressBar(options.adapter, total, state.step, options.progress and is_first)

    def __enter__(self) -> Self:
        if self._record is not None:
            self._record.begin(self._state)
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._record is not None:
            self._record.end(kind, error, trace)

    def evaluated(self) -> None:
        """Report an evaluation that belongs to no step of this run."""
        if not self._state.evaluated:
            return
        step, loss = self._state.eval_losses[-1]
        if self._record is not None:
            self._record.evaluated(step, loss)
        if self._is_first and self._options.progress and not self._bar.is_shown and not step:
            _LOG.info("%s before the first step: eval loss %.4f", self._options.adapter, loss)

    def step(self, done: StepRecord, *, is_last: bool) -> None:
        """Report a step, once it is evaluated and saved."""
        if not self._is_first:
            return
        self._log(done, is_last)
        self._bar.update(done)
        if self._record is not None:
            self._record.step(done)

    def _log(self, done: StepRecord, is_last: bool) -> None:
        if not self._is_due(done, is_last):
            return
        recent = self._state.losses[-max(1, done.step - self._logged) :]
        self._logged = done.step
        evaluated = "" if done.eval_loss is None else f", eval loss {done.eval_loss:.4f}"
        _LOG.info(
            "%s step %d/%d: loss %.4f%s, lr %.3g, gradient norm %.3g, %.0f tokens/s",
            self._options.adapter,
            done.step,
            done.total_steps,
            sum(recent) / len(recent),
            evaluated,
            done.learning_rate,
            done.gradient_norm,
            done.tokens_per_second,
        )

    def _is_due(self, done: StepRecord, is_last: bool) -> bool:
        """Return whether a step has a line: by their number, or by time where there is no bar."""
        every = self._options.log_every
        if every is not None:
            return is_last or not done.step % every
        if not self._options.progress or self._bar.is_shown:
            return False
        now = time.monotonic()
        if not is_last and done.eval_loss is None and now < self._next_line_s:
            return False
        self._next_line_s = now + _LINE_S
        return True

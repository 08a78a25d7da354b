"""Everything that a job says of its steps, on the first rank.

The progress bar of finetuning: loss, learning rate, tokens a second, and the time left.
"""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

from pcg.runtime.training.checkpoints import TrainerState
from pcg.runtime.training.options import FinetuneArguments
from pcg.runtime.training.reports.job_record import JobRecord
from pcg.runtime.training.result import StepRecord

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

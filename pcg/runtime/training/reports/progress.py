"""The progress bar of finetuning: loss, learning rate, tokens a second, and the time left."""

from __future__ import annotations

import sys

from pcg.runtime.training.result import StepRecord


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

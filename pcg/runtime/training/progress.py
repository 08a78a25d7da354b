"""The progress bar of finetuning: loss, learning rate, tokens a second, and the time left."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from pcg.runtime.training.result import StepRecord


class ProgressBar(Protocol):
    """Shows finished steps."""

    def update(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class _Silent:
    def update(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class _Bar:
    def __init__(self, name: str, total: int, done: int) -> None:
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]}"),
            progress.TextColumn("lr {task.fields[rate]}"),
            progress.TextColumn("{task.fields[speed]} tok/s"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        fields: dict[str, Any] = {"loss": "-", "rate": "-", "speed": "-"}
        self._task = self._progress.add_task(name, total=total, completed=done, **fields)
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


def progress_bar(name: str, total: int, done: int, shown: bool) -> ProgressBar:
    """Make a bar on standard error; a silent one if that is no terminal, or none is wanted.

    Args:
        name: the name of the job.
        total: number of steps of the job.
        done: number of steps done before, if it is resumed.
        shown: whether a bar is wanted.
    """
    if not shown or not sys.stderr.isatty():
        return _Silent()
    return _Bar(name, total, done)

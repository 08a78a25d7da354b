"""The writer of a run's record.

<folder>/run.json         the run's name, kind, status, start and end
    <folder>/config.json      the resolved configuration
<folder>/metrics.jsonl    a row for each step: {"step": 1, "time": 1.7e9, "loss": 2.1, …}
<folder>/samples.jsonl    a row for each sample: {"step": 1, "prompt": "…", "reward": 1.0, …}
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pcg.errors import FinetuneInterrupted, RecordError
from pcg.files import expanded, shown_path
from pcg.records.rows import RowWriter
from pcg.records.run_files import (
    CONFIG,
    METRICS,
    MOST_STEPS,
    RUN,
    SAMPLES,
    RunFacts,
    Status,
    has_run,
    plain,
    read_config,
    read_facts,
    set_aside,
    write_json,
)
from pcg.records.sinks import check_sinks, open_sinks
from pcg.units import shown, size_text

_LOG = logging.getLogger("pcg.records")
MOST_BYTES = 2**24
"""Size of metrics.jsonl, about 70,000 steps, above which no page is written if others wait."""
_OWN = ("step", "time")
_LONGEST_NAME = 128


class RunRecord:
    """Writes the record of a run: a folder with its numbers, its configuration and samples.

        with RunRecord("runs/a", {"learning_rate": 1e-4}, kind="grpo") as record:
            record.log(1, reward=0.2, length=31.5)
            record.samples(1, [{"prompt": "2 + 2 =", "completion": " 4", "reward": 1.0}])

    The end of the block ends the record, with a status by the exception, if any; without a block,
    call `end`. A killed run leaves all logged steps. Methods may be called on any thread.

    Attributes:
        folder: the folder.
        last_step: the last step with a row; 0 without rows.
        names_of_last: the names of the last step's numbers.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        kind: str = "run",
        done: int = 0,
        report_to: Sequence[str] = (),
        waits_for_page: bool = True,
    ) -> None:
        """Create the folder, or continue the run that is recorded in it.

        With `done` of 0, a run is continued if it has this configuration and did not complete.
        Another run's record is moved to the folder's `earlier-1`, `earlier-2` and so on.

        Args:
            folder: the folder, used only by this run.
            config: the run's configuration; values that JSON cannot hold become text.
            name: the displayed name; by default the folder's name.
            kind: the kind of run: finetune, grpo, dpo, sft, …
            done: the number of steps in the run's checkpoint. Rows of later steps are removed, as
                these steps run again.
            report_to: further destinations of the numbers: tensorboard, wandb.
            waits_for_page: False to write the page on another thread at the end, for example while
                requests are served.
        Raises:
            RecordError: the folder cannot be written, another run is writing it, or a library of
                `report_to` is not installed.
        """
        check_sinks(report_to)
        self.folder = expanded(folder)
        self._waits_for_page = waits_for_page
        path = self.folder.absolute()
        config = {} if config is None else plain(config)
        self._lock = threading.RLock()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no name of a folder"
            raise RecordError(
                f"a record cannot be written in {shown_path(self.folder)}: {reason}; give another "
                "folder"
            ) from error
        with contextlib.ExitStack() as closing:
            self._metrics = RowWriter(path / METRICS)
            closing.callback(lambda: self._metrics.close())
            begun = time.time()
            if has_run(path) and not done and self._is_another(config):
                set_aside(path)
                self._metrics.close()
                self._metrics = RowWriter(path / METRICS)
            elif has_run(path) and done:
                begun = read_facts(path).begun_s
            self._samples = RowWriter(path / SAMPLES)
            closing.callback(self._samples.close)
            rows = self._metrics.cut(lambda row: 0 < done >= _step_of(row, path / METRICS))
            self._samples.cut(lambda row: 0 < done >= _step_of(row, path / SAMPLES))
            write_json(path / CONFIG, config)
            self._facts = facts = RunFacts(name or path.name, kind, begun)
            write_json(path / RUN, facts.json)
            self._sinks = open_sinks(report_to, path, facts, config, done)
            closing.pop_all()
        self.last_step = rows[-1]["step"] if rows else 0
        self._has_rows = bool(rows)
        of_last = [row for row in rows if row["step"] == self.last_step]
        self.names_of_last = {name for row in of_last for name in row if name not in _OWN}

    def _is_another(self, config: Mapping[str, Any]) -> bool:
        path = self.folder.absolute()
        return read_facts(path).status is Status.COMPLETED or read_config(path) != config

    def log(self, step: int, **numbers: object) -> None:
        """Add numbers of a step, under any names: `log(3, loss=2.1, **{"reward/length": 0.5})`.

        A step may be logged in several parts with different names. A non-finite number is stored as
        null.

        Args:
            step: the step's number, from 0; at least the last step.
            numbers: numbers, or tensors with a single element.
        Raises:
            RecordError: the step is before the last step, already has a number of the name, or a
                value is not a number; or the row cannot be written, for example on a full disk.
        """
        with self._lock:
            self._check_open()
            if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MOST_STEPS:
                raise RecordError(f"step={shown(step)}; use an int from 0 to below 2**53")
            if self._has_rows and step < self.last_step:
                raise RecordError(
                    f"step {step} is logged after step {self.last_step}; log steps in their order"
                )
            row = {name: _number(name, value) for name, value in numbers.items()}
            twice = sorted(self.names_of_last & row.keys()) if step == self.last_step else []
            if twice:
                raise RecordError(f"step {step} has {', '.join(map(shown, twice))} already")
            self._metrics.append([{"step": step, "time": round(time.time(), 3), **row}])
            before = self.names_of_last if step == self.last_step else set()
            self.names_of_last = {*before, *row}
            self.last_step, self._has_rows = step, True
            for sink in self._sinks:
                sink.log(step, row)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows to the table of samples: texts and numbers under any names.

        Raises:
            RecordError: the rows cannot be written.
        """
        with self._lock:
            self._check_open()
            self._samples.append([{"step": step, **plain(row)} for row in rows])

    def end(self, status: Status | str = Status.COMPLETED, error: str | None = None) -> None:
        """End the record; further calls have no effect.

        Args:
            status: completed, failed, interrupted or cancelled.
            error: the message of a run that did not complete.
        Raises:
            RecordError: the end cannot be written.
        """
        with self._lock:
            if self._facts.status is not Status.RUNNING:
                return
            self._facts = self._facts.ended(Status(status), error)
            try:
                write_json(self.folder.absolute() / RUN, self._facts.json)
            finally:
                self._metrics.close()
                self._samples.close()
                for sink in self._sinks:
                    sink.end(is_completed=status == Status.COMPLETED)
        if self._waits_for_page:
            self._write_page()
        else:
            threading.Thread(target=self._write_page, name="pcg page").start()

    def _write_page(self) -> None:
        from pcg.records.page import write_report  # slow import of templates

        path = self.folder.absolute()
        try:
            size = (path / METRICS).stat().st_size
            if size > MOST_BYTES:
                raise RecordError(f"{shown_path(path / METRICS)} is long ({size_text(size)})")
            write_report(path)
        except Exception as failure:  # must not fail the run
            _LOG.warning("%s; `pcg runs report` writes the page", failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
            return
        status = Status.CANCELLED
        if isinstance(error, KeyboardInterrupt | FinetuneInterrupted):
            status = Status.INTERRUPTED
        elif isinstance(error, Exception):
            status = Status.FAILED
        with contextlib.suppress(RecordError):  # raise the run's own error instead
            self.end(status, str(error) or type(error).__name__)

    def _check_open(self) -> None:
        if self._facts.status is not Status.RUNNING:
            raise RecordError(f"the record in {shown_path(self.folder)} has ended")


def _number(name: str, value: object) -> float | int | None:
    """Return a number of a step for JSON. RecordError: not a number, or an unsuitable name."""
    if name in _OWN or not 0 < len(name) <= _LONGEST_NAME:
        raise RecordError(
            f"{shown(name)} is no name of a number; use up to {_LONGEST_NAME} characters, and "
            f"neither of {', '.join(_OWN)}"
        )
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
        if isinstance(value, int):
            return int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise RecordError(f"{name}={shown(value)}; log numbers alone") from None
    return number if math.isfinite(number) else None


def _step_of(row: Mapping[str, Any], path: Path) -> int:
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise RecordError(f"{shown_path(path)} is damaged: a row has the step {shown(step)}")
    return step

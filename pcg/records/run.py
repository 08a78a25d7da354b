"""Recorded runs, running or ended, and their comparison."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pcg.errors import RecordError
from pcg.files import damage_of, expanded, shown_path
from pcg.records.rows import is_written, read_rows
from pcg.records.run_files import (
    METRICS,
    MOST_STEPS,
    SAMPLES,
    RunFacts,
    Status,
    has_run,
    read_config,
    read_facts,
)
from pcg.units import shown

_LONGEST_TEXT = 2000


def text_of(value: object) -> str:
    """Return a value as text of a table, shortened if long."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        value = ", ".join(map(text_of, value))
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def time_text(seconds: float) -> str:
    """Return a time of Unix as a date, in UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "–"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


EVALUATION = "eval_"
"""The prefix of numbers of the evaluation data, such as `eval_loss`."""
_DEEPEST = 8

Point = tuple[int, float]
"""A step and a number of the step."""


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        folder: the folder of the record.
        facts: the name, kind, start and end.
        status: the status in `facts`; `stopped` for a run that was killed while running.
        config: the configuration.
        series: the finite points of each number by name, in order of steps.
        last_step: the last step; 0 without steps.
        last_s: the time of the last step's row, in seconds of Unix time.
    """

    folder: Path
    facts: RunFacts
    status: Status
    config: Mapping[str, Any]
    series: Mapping[str, Sequence[Point]]
    last_step: int
    last_s: float

    def last(self, name: str) -> float | None:
        """Return the last value of a number; None without values."""
        points = self.series.get(name)
        return points[-1][1] if points else None

    def least(self, name: str) -> Point | None:
        """Return the minimum of a number, with its step; None without values."""
        return min(self.series.get(name, ()), key=lambda point: point[1], default=None)

    @property
    def seconds(self) -> float:
        """Time from the start to the last row, including pauses."""
        return max(0.0, (self.facts.ended_s or self.last_s) - self.facts.begun_s)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of the table of samples. RecordError: the table is damaged."""
        return read_rows(self.folder / SAMPLES)


def read_run(folder: str | Path) -> Run:
    """Read the record of a run.

    Raises:
        RecordError: the record is missing, or damaged before its last line.
    """
    path = expanded(folder)
    if not has_run(path):
        raise RecordError(f"{shown_path(path)} has no record of a run; `pcg runs` lists those")
    facts, config = read_facts(path), read_config(path)
    status = facts.status
    if status is Status.RUNNING and not is_written(path / METRICS):
        status = Status.STOPPED
    series: dict[str, list[Point]] = {}
    last_step, last_s = 0, facts.begun_s
    with damage_of(shown_path(path / METRICS), RecordError):
        for row in read_rows(path / METRICS):
            last_step, last_s = _step(row.pop("step")), float(row.pop("time"))
            for name, value in row.items():
                points = series.setdefault(name, [])
                if value is not None and math.isfinite(value):
                    points.append((last_step, float(value)))
    return Run(path, facts, status, config, series, last_step, last_s)


def find_runs(folder: str | Path) -> Iterator[Path]:
    """Yield the folders of records in a folder and below, in order of names.

    Raises:
        RecordError: the folder does not exist.
    """
    top = expanded(folder)
    if not top.is_dir():
        raise RecordError(f"{shown_path(top)} is no folder; give one that has records below it")
    for path, folders, _ in os.walk(top):
        place = Path(path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(place.relative_to(top).parts) >= _DEEPEST:
            folders.clear()
        if has_run(place):
            yield place


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration with nested objects flattened: `{"peft.r": 8}`."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _step(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_STEPS:
        raise ValueError(f"the step {shown(value)} is none")
    return value


# --------------------------------------------------------------------------------------- comparison


LOSSES = ("loss", f"{EVALUATION}loss")
_MINOR = ("epoch", "tokens", "learning_rate", "gradient_norm", "memory_bytes", "tokens_per_second")
"""Numbers that do not measure the quality of a run."""
_ABSENT = object()


@dataclass(frozen=True)
class Comparison:
    """Runs to compare, in the given order.

    Attributes:
        names: a unique name of each run.
    """

    runs: Sequence[Run]
    names: Sequence[str]

    @property
    def differing(self) -> dict[str, list[Any]]:
        """The options that differ, with each run's value; None for a missing option."""
        configs = [flat(run.config) for run in self.runs]
        differing = {}
        for name in dict.fromkeys(name for config in configs for name in config):
            values = [config.get(name, _ABSENT) for config in configs]
            if any(value != values[0] for value in values):
                differing[name] = [None if value is _ABSENT else value for value in values]
        return differing

    @property
    def results(self) -> dict[str, list[Any]]:
        """The results by name, with each run's value."""
        rows: dict[str, list[Any]] = {
            "status": [str(run.status) for run in self.runs],
            "steps": [run.last_step for run in self.runs],
        }
        for name in LOSSES:
            if any(name in run.series for run in self.runs):
                rows[f"{name}, last"] = [run.last(name) for run in self.runs]
                least = [run.least(name) for run in self.runs]
                rows[f"{name}, best"] = [None if point is None else point[1] for point in least]
        others = dict.fromkeys(name for run in self.runs for name in run.series)
        for name in others:
            if name not in (*LOSSES, *_MINOR):
                rows[f"{name}, last"] = [run.last(name) for run in self.runs]
        rows["tokens/s"] = [run.last("tokens_per_second") for run in self.runs]
        rows["seconds"] = [run.seconds for run in self.runs]
        return rows

    @property
    def json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        runs = []
        for place, (run, name) in enumerate(zip(self.runs, self.names, strict=True)):
            results = {what: values[place] for what, values in self.results.items()}
            options = {what: values[place] for what, values in self.differing.items()}
            runs.append(
                {"run": name, "folder": str(run.folder), "results": results, "options": options}
            )
        return {"runs": runs}


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs, each named by the part of its path that differs from the others."""
    paths = [run.folder.absolute().parts for run in runs]
    start = end = 0
    if len(set(paths)) > 1:
        least = min(map(len, paths))
        while start < least and len({path[start] for path in paths}) == 1:
            start += 1
        while end < least - start - 1 and len({path[-1 - end] for path in paths}) == 1:
            end += 1
    names = ["/".join(path[start : len(path) - end]) or path[-1] for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return Comparison(runs, names)

"""The files of a record that are written atomically: facts and configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pcg.errors import RecordError
from pcg.files import damage_of, is_file, read_json, shown_path
from pcg.units import shown
from pcg.version import __version__

RUN, CONFIG, METRICS, SAMPLES = "run.json", "config.json", "metrics.jsonl", "samples.jsonl"
REPORT = "report.html"
TENSORBOARD = "tensorboard"
FILES = (METRICS, SAMPLES, CONFIG, REPORT, TENSORBOARD, RUN)
FORMAT = 1
MOST_STEPS = 2**53
"""The limit of steps, below which floats are exact."""
_MOST_DIGITS = 4000


class Status(StrEnum):
    """The state of a run; readers report a killed run, whose file says `running`, as `stopped`."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RunFacts:
    """The content of run.json.

    Attributes:
        name: the displayed name.
        kind: the kind of run, such as `finetune`.
        begun_s, ended_s: start and end, in seconds of Unix time; `ended_s` is None before the end.
        error: the message of a failed run.
    """

    name: str
    kind: str
    begun_s: float
    status: Status = Status.RUNNING
    ended_s: float | None = None
    error: str | None = None
    pcg: str = __version__

    def ended(self, status: Status, error: str | None) -> Self:
        """Return the facts with the present time as the end."""
        return dataclasses.replace(self, status=status, error=error, ended_s=time.time())

    @property
    def json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


def has_run(folder: Path) -> bool:
    """Return True if a folder has the record of a run."""
    return is_file(folder / RUN)


def set_aside(folder: Path) -> None:
    """Move a folder's record into a subfolder. RecordError: the record cannot be moved."""
    try:
        number = 1
        while (place := folder / f"earlier-{number}").exists():
            number += 1
        place.mkdir()
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / name, place / name)
    except OSError as error:
        raise RecordError(
            f"the record in {shown_path(folder)} cannot be set aside: {error.strerror}; give "
            "another folder"
        ) from error


def read_facts(folder: Path) -> RunFacts:
    """Read run.json. RecordError: the file is damaged, or of another version."""
    path = folder / RUN
    fields = read_json(path, RecordError)
    if fields.pop("format", None) != FORMAT:
        raise RecordError(f"{shown_path(path)} is of another format; read it with a newer pcg")
    with damage_of(shown_path(path), RecordError):
        facts = RunFacts(**{**fields, "status": Status(fields["status"])})
        if not all(isinstance(text, str) for text in (facts.name, facts.kind, facts.pcg)):
            raise ValueError("a name is no text")
        if not isinstance(facts.begun_s + (facts.ended_s or 0.0), float):
            raise ValueError("a time is no number")
        return facts


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. RecordError: the file is missing or damaged."""
    return read_json(folder / CONFIG, RecordError)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON, atomically. RecordError: the file cannot be written."""
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. RecordError: the file cannot be written."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise RecordError(
            f"{shown_path(path)} cannot be written: {error.strerror}; what was there stays. Make "
            "room, or give another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """Return a value that JSON can hold; other values become text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < _MOST_DIGITS else shown(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value) if isinstance(value, Path) else shown(value, 1000)

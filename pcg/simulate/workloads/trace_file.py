"""Trace files: a request a line, as JSON, in order of time.

    {"time_s": 0.25, "adapter": "adapter-3", "prompt_tokens": 310, "output_tokens": 64}
    {"time_s": 0.31, "prompt_tokens": 12, "output_tokens": 200, "tenant": "b"}

A request without `adapter` is for the base model. Blank lines are skipped. Numbers are read back
exactly as they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.timed_request import TimedRequest

_KEYS = tuple(field.name for field in fields(TimedRequest))
_NEEDED = ("time_s", "prompt_tokens", "output_tokens")


def write_trace(requests: Iterable[TimedRequest], path: Path) -> None:
    """Write requests, a line each."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            known = {key: value for key, value in asdict(request).items() if value is not None}
            file.write(json.dumps(known, ensure_ascii=False) + "\n")


def read_trace(path: Path) -> Iterator[TimedRequest]:
    """Yield the requests of a file.

    Raises:
        BenchmarkError: the file is missing, a line is not a request, or its time precedes the last.
    """
    if not path.is_file():
        raise BenchmarkError(f"no trace file {path}")
    before = 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            request = _request(_object(line, where), where)
            if request.time_s < before:
                raise BenchmarkError(
                    f"{where}: time_s={request.time_s} is before the last, {before}; sort the lines"
                )
            before = request.time_s
            yield request


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BenchmarkError(f"{where}: not JSON: {error}; write one object a line") from error
    if not isinstance(value, dict):
        raise BenchmarkError(f"{where}: not an object; write {{{', '.join(map(repr, _NEEDED))}}}")
    return value


def _request(value: dict[str, Any], where: str) -> TimedRequest:
    for key in _NEEDED:
        if key not in value:
            raise BenchmarkError(
                f"{where}: no {key!r}; it has {', '.join(map(repr, value)) or '{}'}"
            )
    for key in value:
        if key not in _KEYS:
            raise BenchmarkError(f"{where}: unknown key {key!r}; use {', '.join(_KEYS)}")
    time_s = value["time_s"]
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise BenchmarkError(f"{where}: time_s={time_s!r} is not a number")
    for key in ("adapter", "tenant"):
        if not isinstance(value.get(key), str | None):
            raise BenchmarkError(f"{where}: {key}={value[key]!r} is not a string")
    try:
        return TimedRequest(**{"adapter": None, **value})
    except BenchmarkError as error:
        raise BenchmarkError(f"{where}: {error}") from error

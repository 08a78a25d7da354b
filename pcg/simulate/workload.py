"""Workload of timed requests in order of time, and its trace file: a JSON object per line.

    {"time_s": 0.25, "adapter": "adapter-3", "prompt_tokens": 310, "output_tokens": 64}
    {"time_s": 0.31, "prompt_tokens": 12, "output_tokens": 200, "tenant": "b"}

A request without `adapter` is for the base model. Blank lines are skipped. Numbers survive a round
trip exactly.

Public traces can also be read: the CSV of Azure's LLM inference traces and of BurstGPT.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from pcg.errors import BenchmarkError
from pcg.files import damage_of, is_file, json_value, shown_path


def require_positive(name: str, value: float) -> None:
    """Raise a BenchmarkError unless a value is a finite number above 0."""
    if not 0 < value < math.inf:
        raise BenchmarkError(f"{name}={value}; use a finite number above 0")


def require_count(name: str, value: int, least: int = 1) -> None:
    """Raise a BenchmarkError unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BenchmarkError(f"{name}={value!r}; use a whole number of at least {least}")


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request without its text; without an adapter, it is for the base model.

    Attributes:
        time_s: the time of its arrival from the workload's start, seconds.
    Raises:
        BenchmarkError: a value is out of range.
    """

    time_s: float
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf:
            raise BenchmarkError(f"time_s={self.time_s}; use a finite number of at least 0")
        require_count("prompt_tokens", self.prompt_tokens)
        require_count("output_tokens", self.output_tokens)


_KEYS = tuple(field.name for field in fields(TimedRequest))
_NEEDED = ("time_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Workload:
    """Requests in order of time; requests of equal time keep their given order.

    Raises:
        BenchmarkError: no requests, or requests out of order.
    """

    requests: tuple[TimedRequest, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise BenchmarkError(
                "a workload of no requests; use a longer duration or a higher rate"
            )
        for index, (before, after) in enumerate(pairwise(self.requests), start=1):
            if after.time_s < before.time_s:
                raise BenchmarkError(
                    f"request {index} comes at {after.time_s} s, before request {index - 1} at "
                    f"{before.time_s} s; sort them by time_s"
                )

    def __iter__(self) -> Iterator[TimedRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        """The time of the last arrival, seconds."""
        return self.requests[-1].time_s

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the requests' adapters, in order of their first request."""
        return tuple(
            dict.fromkeys(request.adapter for request in self if request.adapter is not None)
        )

    def at_rate(self, rate_per_s: float) -> Workload:
        """Return the requests with times scaled to a mean rate, requests / duration.

        FlexLLM v2 §8 scales its trace in this way.

        Raises:
            BenchmarkError: the rate is not above 0, or all requests arrive at 0 s.
        """
        require_positive("rate_per_s", rate_per_s)
        if self.duration_s == 0:
            raise BenchmarkError("all requests come at 0 s; they have no rate that can be changed")
        stretch = len(self) / rate_per_s / self.duration_s
        return Workload(
            tuple(replace(request, time_s=request.time_s * stretch) for request in self)
        )

    def part(self, start_s: float, end_s: float) -> Workload:
        """Return the requests from `start_s` up to `end_s`, with times relative to `start_s`.

        Raises:
            BenchmarkError: no request is in the range.
        """
        inside = [request for request in self if start_s <= request.time_s < end_s]
        if not inside:
            raise BenchmarkError(
                f"no request from {start_s} s to {end_s} s; the last comes at {self.duration_s} s"
            )
        return Workload(
            tuple(replace(request, time_s=request.time_s - start_s) for request in inside)
        )

    def save(self, path: str | Path) -> None:
        """Write a trace file."""
        with Path(path).open("w", encoding="utf-8") as file:
            for request in self:
                known = {key: value for key, value in asdict(request).items() if value is not None}
                file.write(json.dumps(known, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a trace file.

        Raises:
            BenchmarkError: the file is missing, a line is not a request, or its time precedes the
                previous time.
        """
        path = Path(path)
        if not is_file(path):
            raise BenchmarkError(f"no trace file {shown_path(path)}")
        requests: list[TimedRequest] = []
        with damage_of(str(path), BenchmarkError), path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                request = _request(_object(line, where), where)
                before = requests[-1].time_s if requests else 0.0
                if request.time_s < before:
                    raise BenchmarkError(
                        f"{where}: time_s={request.time_s} is before the last, {before}; sort the "
                        "lines"
                    )
                requests.append(request)
        if not requests:
            raise BenchmarkError(f"{path} holds no requests")
        return cls(tuple(requests))


def _object(line: bytes, where: str) -> dict[str, Any]:
    value = json_value(line.rstrip(), where, BenchmarkError, "; write one object a line")
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


# ------------------------------------------------------------------------------------- public trace


@dataclass(frozen=True)
class _Form:
    """The columns of a trace, and a function that reads its times, in whole microseconds."""

    time: str
    prompt: str
    output: str
    microseconds: Callable[[str], int]


def _of_moment(text: str) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=None)
    return (moment - datetime(2000, 1, 1)) // timedelta(microseconds=1)


def _of_seconds(text: str) -> int:
    return round(float(text) * 1e6)


_FORMS = (
    _Form("TIMESTAMP", "ContextTokens", "GeneratedTokens", _of_moment),
    _Form("Timestamp", "Request tokens", "Response tokens", _of_seconds),
)


def read_public_trace(path: str | Path) -> Workload:
    """Read a public trace; its times start at 0 with the earliest request.

    Raises:
        BenchmarkError: the file is missing, its header matches neither trace, a row has no number
            where a number is required, or no request is left.
    """
    path = Path(path)
    if not is_file(path):
        raise BenchmarkError(f"no trace file {shown_path(path)}")
    with damage_of(str(path), BenchmarkError, "; download it again"):
        rows = sorted(_rows(path), key=lambda row: row[0])
    if not rows:
        raise BenchmarkError(f"{path} holds no requests that have a prompt and an output")
    first = rows[0][0]
    return Workload(
        tuple(
            TimedRequest((time - first) / 1e6, None, prompt, output)
            for time, prompt, output in rows
        )
    )


def _rows(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield time in microseconds, prompt and output tokens of each request."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        form = next(
            (form for form in _FORMS if {form.time, form.prompt, form.output} <= {*names}), None
        )
        if form is None:
            known = "; ".join(f"{form.time}, {form.prompt}, {form.output}" for form in _FORMS)
            raise BenchmarkError(
                f"{path} has columns {', '.join(names) or 'none'}; a trace has one of: {known}"
            )
        for row in reader:
            where = f"{path} line {reader.line_num}"
            try:
                time = form.microseconds(row[form.time])
                prompt, output = int(row[form.prompt]), int(row[form.output])
            except (OverflowError, TypeError, ValueError) as error:  # a short row is a TypeError
                raise BenchmarkError(f"{where}: {error}") from error
            if prompt and output:
                yield time, prompt, output

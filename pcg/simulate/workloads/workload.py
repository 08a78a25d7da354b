"""A workload: timed requests in order of time, and its trace file: a request a line, as JSON.

    {"time_s": 0.25, "adapter": "adapter-3", "prompt_tokens": 310, "output_tokens": 64}
    {"time_s": 0.31, "prompt_tokens": 12, "output_tokens": 200, "tenant": "b"}

A request without `adapter` is for the base model. Blank lines are skipped. Numbers are read back
exactly as they were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pcg.errors import BenchmarkError
from pcg.files import damage_of, is_file, json_value, shown_path
from pcg.simulate.workloads.checks import require_count, require_positive


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, without its text; one without an adapter is for the base model.

    Attributes:
        time_s: the time of its arrival from the workload's start, seconds.
    Raises:
        BenchmarkError: a value is out of its range.
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
    """Requests in order of time; those of the same time are in the order given.

    Raises:
        BenchmarkError: there are none, or they are out of order.
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
        return tuple(dict.fromkeys(one.adapter for one in self if one.adapter is not None))

    def at_rate(self, rate_per_s: float) -> Workload:
        """Return the same requests with times scaled to a mean rate, requests / duration.

        FlexLLM v2 §8 replays a trace so.

        Raises:
            BenchmarkError: the rate is not above 0, or all requests come at 0 s.
        """
        require_positive("rate_per_s", rate_per_s)
        if self.duration_s == 0:
            raise BenchmarkError("all requests come at 0 s; they have no rate that can be changed")
        stretch = len(self) / rate_per_s / self.duration_s
        return Workload(tuple(replace(one, time_s=one.time_s * stretch) for one in self))

    def part(self, start_s: float, end_s: float) -> Workload:
        """Return the requests from `start_s` up to `end_s`, with times from `start_s` on.

        Raises:
            BenchmarkError: there are none.
        """
        inside = [one for one in self if start_s <= one.time_s < end_s]
        if not inside:
            raise BenchmarkError(
                f"no request from {start_s} s to {end_s} s; the last comes at {self.duration_s} s"
            )
        return Workload(tuple(replace(one, time_s=one.time_s - start_s) for one in inside))

    def save(self, path: str | Path) -> None:
        """Write a trace file."""
        with Path(path).open("w", encoding="utf-8") as file:
            for one in self:
                known = {key: value for key, value in asdict(one).items() if value is not None}
                file.write(json.dumps(known, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a trace file.

        Raises:
            BenchmarkError: the file is missing, a line is not a request, or its time precedes the
                last.
        """
        path = Path(path)
        if not is_file(path):
            raise BenchmarkError(f"no trace file {shown_path(path)}")
        found: list[TimedRequest] = []
        with damage_of(str(path), BenchmarkError), path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                request = _request(_object(line, where), where)
                before = found[-1].time_s if found else 0.0
                if request.time_s < before:
                    raise BenchmarkError(
                        f"{where}: time_s={request.time_s} is before the last, {before}; sort the "
                        "lines"
                    )
                found.append(request)
        if not found:
            raise BenchmarkError(f"{path} holds no requests")
        return cls(tuple(found))


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

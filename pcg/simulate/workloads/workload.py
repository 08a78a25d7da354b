"""A workload: timed requests in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.checks import require_positive
from pcg.simulate.workloads.timed_request import TimedRequest
from pcg.simulate.workloads.trace_file import read_trace, write_trace


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
        """Write a trace file; see `trace_file`."""
        write_trace(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a trace file; see `trace_file`.

        Raises:
            BenchmarkError: the file is missing, or a line is not a request.
        """
        requests = tuple(read_trace(Path(path)))
        if not requests:
            raise BenchmarkError(f"{path} holds no requests")
        return cls(requests)

"""A case of the GPU benchmark: what it gives, and how it is timed.

Times are medians between CUDA events. Before each the L2 cache is overwritten, which also gives the
host time to launch what comes, so that small kernels are not measured by their launches. What a
decode step runs is replayed from a CUDA graph, ours and the peers' alike, and what takes a few
microseconds is in it several times, each with tensors of its own, as in a model's layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any, Protocol, TypeAlias

from gpu_work import Ceilings, Work

FLUSH_BYTES = 256 * 2**20
"""Five times the L2 cache of an H200."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        setting: the measurement of the case.
        ours_us: our time; None where there is none, and `note` says why.
        floor_us: what bytes and FLOPs take at the ceilings; None where none is counted.
        bytes: the bytes that the work cannot do without; `flops` likewise.
        target: the time that is aimed at, in words; empty for none.
        ours_bytes: our peak memory; 0 where it is not measured.
        peers_bytes: peak memory of the peers, by name.
        reached: the number that the target is about.
        details: further numbers, for the file alone.
    """

    case: str
    setting: str
    ours_us: float | None = None
    peers_us: Mapping[str, float] = field(default_factory=dict)
    floor_us: float | None = None
    bytes: int = 0
    flops: int = 0
    target: str = ""
    reached: float | None = None
    met: bool | None = None
    ours_bytes: int = 0
    peers_bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False

    @property
    def share(self) -> float | None:
        """The share of the ceiling that our time reaches."""
        return None if not (self.ours_us and self.floor_us) else self.floor_us / self.ours_us

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        return cls(**{key: value for key, value in fields.items() if key != "share"})

    @classmethod
    def failure(cls, case: str, setting: str, why: str) -> Row:
        return cls(case, setting, note=why, failed=True)


class Timer(Protocol):
    """A clock of calls on the device."""

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        """The median over repeats, after a warm-up, in microseconds.

        Args:
            run: what is timed; the same work at every call.
            captured: whether it is recorded in a CUDA graph once, and that is what is timed.
            times: how often one call does the work.
        """


class CudaTimer:
    """Times between CUDA events, the L2 cache cold.

    Args:
        seconds: time for the repeats of one call, about.
    """

    def __init__(self, seconds: float, most: int) -> None:
        import torch

        self._seconds, self._most = seconds, most
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        run()  # compiles
        if captured:
            run = self._graph(run)
        once_us = self._times(run, 2)[-1]
        return statistics.median(self._times(run, self.repeats(once_us))) / times

    def repeats(self, once_us: float) -> int:
        """The number of runs of a call that takes so long: three at least."""
        return max(3, min(self._most, int(1e6 * self._seconds / max(once_us, 1.0))))

    def _times(self, run: Callable[[], object], repeats: int) -> list[float]:
        import torch

        pairs = []
        for _ in range(repeats):
            self._flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]

    @staticmethod
    def _graph(run: Callable[[], object]) -> Callable[[], object]:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # outside of the capture, so that libraries make their workspaces
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


@dataclass(frozen=True)
class Bench:
    """The means of a case to measure.

    Attributes:
        ceilings: the device's, measured before.
        until: time of `monotonic` from which on no setting begins.
    """

    timer: Timer
    ceilings: Ceilings
    quick: bool = False
    until: float = float("inf")
    device: str = "cuda"

    def has_time(self) -> bool:
        return monotonic() < self.until

    def peers_us(
        self, peers: Mapping[str, Callable[[], object]], captured: bool = False, times: int = 1
    ) -> tuple[dict[str, float], str]:
        """Times of the peers by name, and what went wrong with those that have none."""
        found, wrong = {}, []
        for name, run in peers.items():
            try:
                found[name] = self.timer.median_us(run, captured, times)
            except Exception as error:  # of theirs: ours is measured all the same
                wrong.append(f"{name}: {type(error).__name__}: {_first_line(error)}")
        return found, "; ".join(wrong)

    def row(self, case: str, setting: str, ours_us: float, work: Work, **more: Any) -> Row:
        """A row with its floor; `more` are further fields."""
        floor = self.ceilings.floor_us(work)
        return Row(
            case, setting, ours_us, more.pop("peers_us", {}), floor, work.bytes, work.flops, **more
        )

    def aimed(self, row: Row, target: str, least: float) -> Row:
        """A row whose share of the ceiling has to be so much."""
        assert row.share is not None
        return replace(row, target=target, reached=row.share, met=row.share >= least)


Setting: TypeAlias = tuple[str, Callable[[], Row]]
"""A measurement in words, and the function that makes it."""


@dataclass(frozen=True)
class Case:
    """Rows that belong together, measured in a process of their own.

    Attributes:
        seconds: the most that it may take, start and compilation included.
        settings: its measurements, the most important ones first, for time may run out.
        environment: variables of its process.
    """

    name: str
    seconds: float
    settings: Callable[[Bench], Iterable[Setting]]
    environment: Mapping[str, str] = field(default_factory=dict)


def measured(bench: Bench, case: Case) -> Iterator[Row]:
    """A row for each setting of a case; where one cannot be measured, it says why."""
    try:
        settings = iter(case.settings(bench))
    except Exception as error:
        yield Row.failure(case.name, "all", _said(error))
        return
    while True:
        try:
            setting, measure = next(settings)
        except StopIteration:
            return
        except Exception as error:
            yield Row.failure(case.name, "the rest", _said(error))
            return
        if not bench.has_time():
            yield Row.failure(case.name, setting, f"the case's {case.seconds:.0f} s were over")
            continue
        try:
            yield measure()
        except Exception as error:  # of whatever library: the other settings go on
            yield Row.failure(case.name, setting, _said(error))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def check_close(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Raise an AssertionError if tensors differ by more than so much of the largest element."""
    expected = expected.double()
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise AssertionError(f"{what} is off by {error:.1e} of its largest; {tolerance} allowed")

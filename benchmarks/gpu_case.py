"""A case of the first hour on a GPU: what it gives, and how it is timed.

Times of kernels are medians between CUDA events. Before each the L2 cache is overwritten, which
also gives the host time to launch what comes, so that small kernels are not measured by their
launches. What a decode step runs is replayed from a CUDA graph, ours and the peers' alike, and what
takes a few microseconds is in it several times, each with tensors of its own, as in a model's
layers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any, Protocol, TypeAlias

from gpu_work import Ceilings, Work
from measure import RESULTS

FLUSH_BYTES = 256 * 2**20
"""Five times the L2 cache of an H200."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        setting: the measurement of the case.
        ours_us: our time; None where there is none, and `note` says why.
        floor_us: what bytes and FLOPs take at the ceilings; None where none is counted.
        expected_us: the prediction by count: the time of all launches on this device.
        bytes: the bytes that the work cannot do without; `flops` likewise.
        target: the number that is aimed at, in words; empty for none.
        ours_bytes: our peak memory; 0 where it is not measured.
        peers_bytes: peak memory of the peers, by name.
        reached: the number that the target is about.
        details: further numbers, for the file alone.
        took_s: the time that it took to measure, compilation included.
    """

    case: str = ""
    setting: str = ""
    ours_us: float | None = None
    peers_us: Mapping[str, float] = field(default_factory=dict)
    floor_us: float | None = None
    expected_us: float | None = None
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
    took_s: float = 0.0

    @property
    def predicted_us(self) -> float | None:
        """The prediction by count: the expected time, or the floor where only that is counted."""
        return self.expected_us or self.floor_us

    @classmethod
    def failure(cls, case: str, setting: str, why: str) -> Row:
        return cls(case, setting, note=why, failed=True)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def at_most(self, target: str, reached: float | None, most: float) -> Row:
        """Return the row with a target; `reached` is None if the number is not known."""
        met = None if reached is None else reached <= most
        return replace(self, target=target, reached=reached, met=met)


class Timer(Protocol):
    """A clock of calls on the device."""

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        """The median over repeats, after a warm-up, in microseconds.

        Args:
            run: what is timed; the same work at every call.
            captured: whether it is recorded in a CUDA graph once, and that is what is timed.
            times: how often one call does the work.
        """


class Once:
    """A timer that only runs what it is given, where kernels are checked and not timed."""

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        run()
        return 1.0


class CudaTimer:
    """Times between CUDA events, the L2 cache cold.

    Args:
        seconds: time for the repeats of one call, about.
    """

    def __init__(self, seconds: float = 0.1, most: int = 50) -> None:
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
        known: the rows that are known, by case and setting; `measured` adds to them.
        until: time of `monotonic` from which on no setting begins.
        device: the device of engines.
        eager_device: the device of single kernels and of peers; the CPU where engines run on the
            stand-in of a GPU, which has no autograd.
    """

    timer: Timer
    ceilings: Ceilings
    known: dict[tuple[str, str], Row] = field(default_factory=dict)
    until: float = float("inf")
    device: str = "cuda"
    eager_device: str = "cuda"

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

    def row(self, ours_us: float, work: Work, **more: Any) -> Row:
        """A row with its floor; `more` are further fields."""
        floor_us = self.ceilings.floor_us(work)
        return Row(
            ours_us=ours_us, floor_us=floor_us, bytes=work.bytes, flops=work.flops, **more
        )  # fmt: skip

    def aimed(self, row: Row, target: str, least: float) -> Row:
        """Return the row with a target for its share of the ceiling."""
        assert row.floor_us is not None
        assert row.ours_us is not None
        share = row.floor_us / row.ours_us
        return replace(row, target=target, reached=share, met=share >= least)

    def expected_us(self, step: str) -> float:
        """Predict the time of a step of results/roofline.json on this device.

        time = floor here * (expected / floor), both counted for an H200
        """
        counted = json.loads((RESULTS / "roofline.json").read_text())["steps"][step]
        bytes_, flops, floor_us, expected_us = (
            counted[name]["value"] for name in ("bytes", "flops", "floor_us", "expected_us")
        )
        here_us = self.ceilings.floor_us(Work(bytes_, flops))
        return float(here_us * expected_us / floor_us)

    def ours_us(self, case: str, setting: str) -> float | None:
        """Our time of a row that is known; None for another."""
        row = self.known.get((case, setting))
        return None if row is None else row.ours_us


Setting: TypeAlias = tuple[str, Callable[[], Row]]
"""A measurement in words, and the function that makes it; the row's names are put in later."""


@dataclass(frozen=True)
class Case:
    """Rows that belong together.

    Attributes:
        seconds: the time after which no setting begins while other cases wait.
        settings: function that gives the measurements, the most valuable first.
        alone: True if the case runs in a process of its own.
    """

    name: str
    seconds: float
    settings: Callable[[Bench], Iterable[Setting]]
    alone: bool = False


def measured(
    bench: Bench, case: Case, skipped: Collection[str] = ()
) -> Iterator[tuple[str, Row | None]]:
    """Yield each setting of a case with None as it begins, then with its row.

    The row of a setting that cannot be measured says why.

    Args:
        skipped: settings that are left out.
    Raises:
        TimeoutError: the bench's time is over, and settings are left.
    """
    settings = iter(case.settings(bench))
    for setting, measure in settings:
        if setting in skipped:
            continue
        if monotonic() >= bench.until:
            raise TimeoutError
        yield setting, None
        began = monotonic()
        try:
            row = replace(measure(), case=case.name, setting=setting)
        except Exception as error:  # of whatever library: the other settings go on
            row = Row.failure(case.name, setting, f"{type(error).__name__}: {error}")
        row = replace(row, took_s=round(monotonic() - began, 2))
        bench.known[case.name, setting] = row
        yield setting, row


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def check_close(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Raise an AssertionError if tensors differ by more than so much of the largest element."""
    expected = expected.double()
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise AssertionError(f"{what} is off by {error:.1e} of its largest; {tolerance} allowed")

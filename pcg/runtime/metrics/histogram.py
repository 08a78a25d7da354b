"""Histograms: numbers of samples by bounds, in memory that does not grow with them."""

from __future__ import annotations

from bisect import bisect_left

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
LENGTH_BOUNDS = tuple(first * 10**zeros for zeros in range(6) for first in (1, 2, 5))
"""The bounds of vLLM's histograms (vllm/v1/metrics/loggers.py): seconds, tokens of a step,
continuations of a prompt, preemptions of a request, and tokens of a request; vLLM cuts the last
ones at the longest sequence of the model."""


class Histogram:
    """Numbers of samples by bounds; another thread may read it while one observes.

    Attributes:
        bounds: upper bounds, in the samples' unit.
        counts: the samples up to each bound and above the one before, and last those above all.
        sum: the sum of the samples.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean of the samples; None without any."""
        count = self.count
        return self.sum / count if count else None

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_equal(self, value: float, times: int) -> None:
        """Add so many equal samples."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, other: Histogram) -> None:
        """Add another's samples, which has the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def percentile(self, percent: float) -> float | None:
        """Estimate a percentile as Prometheus' `histogram_quantile` does; None without samples.

        Samples are taken to lie evenly between two bounds; those above all bounds count as the
        last one.
        """
        counts = list(self.counts)
        rank = sum(counts) * percent / 100
        if not rank:
            return None
        below, low = 0, 0.0
        for bound, count in zip(self.bounds, counts, strict=False):
            if below + count >= rank:
                return low + (bound - low) * (rank - below) / count
            below, low = below + count, bound
        return self.bounds[-1]

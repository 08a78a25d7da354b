"""The distribution of a latency: mean, standard deviation and percentiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """A summary of samples, in seconds.

    Attributes:
        count: number of samples.
        std_s: standard deviation of the samples, divided by their number.
        median_s, p90_s, p99_s: percentiles, interpolated linearly, as in vLLM's benchmark.
    """

    count: int
    mean_s: float
    std_s: float
    median_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """Summarise samples in any order; None if there are none."""
        found = np.fromiter(samples, float)
        if not len(found):
            return None
        # Rounding may put a mean outside of its samples by a hair.
        mean = np.clip(found.mean(), found.min(), found.max())
        percentiles = np.percentile(found, (50, 90, 99)).tolist()
        return cls(len(found), float(mean), float(found.std()), *percentiles)

"""The distribution of a latency: mean, spread and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Distribution:
    """What there is to say of a number of samples, in seconds.

    Attributes:
        count: how many samples.
        std_s: standard deviation of the samples themselves (divided by their number).
        median_s, p90_s, p99_s: percentiles, see `percentile`.
    """

    count: int
    mean_s: float
    std_s: float
    median_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """Of samples in any order; None if there are none."""
        ordered = sorted(samples)
        if not ordered:
            return None
        # A mean in floats may be a hair outside of its samples; the percentiles cannot.
        mean = min(max(math.fsum(ordered) / len(ordered), ordered[0]), ordered[-1])
        return cls(
            count=len(ordered),
            mean_s=mean,
            std_s=math.sqrt(math.fsum((one - mean) ** 2 for one in ordered) / len(ordered)),
            median_s=percentile(ordered, 0.5),
            p90_s=percentile(ordered, 0.9),
            p99_s=percentile(ordered, 0.99),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The number that so large a share of ordered samples does not exceed.

    It lies on straight lines between samples, the first at 0 and the last at 1, as numpy's default
    and so vLLM's benchmark have it.

    Args:
        ordered: at least one sample, rising.
        share: from 0 to 1.
    """
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    between = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return min(between, ordered[high])


def cumulative(ordered: Sequence[float], points: int) -> list[tuple[float, float]]:
    """(sample, share of samples up to it) at so many places at most, from the first to the last."""
    many = min(points, len(ordered))
    if many < 2:
        return [(ordered[0], 0.0), (ordered[0], 1.0)]
    found = [(percentile(ordered, i / (many - 1)), i / (many - 1)) for i in range(many)]
    return [one for one, after in pairwise(found) if one != after] + [found[-1]]

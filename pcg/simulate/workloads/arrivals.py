"""When requests come: arrival processes, each of a mean rate.

    Constant   every 1/rate
    Poisson    intervals are exponential
    Gamma      intervals are Gamma distributed: mean 1/rate, standard deviation cv/rate
    Bursty     Poisson at a rate that is drawn anew every period
    RateCurve  Poisson at a rate that follows a curve

All start at time 0 in their steady state: the mean number of requests in any T seconds is rate · T
(over whole periods, for `RateCurve`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from random import Random

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.checks import require_positive


@dataclass(frozen=True)
class Arrivals(ABC):
    """An arrival process.

    Attributes:
        rate_per_s: the mean rate, requests a second.
    Raises:
        BenchmarkError: a parameter is out of its range.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        require_positive("rate_per_s", self.rate_per_s)

    @abstractmethod
    def times_s(self, random: Random) -> Iterator[float]:
        """Yield the times of arrival from 0 on, in seconds, without end."""


@dataclass(frozen=True)
class Constant(Arrivals):
    """A request every 1/rate, the first at 0."""

    def times_s(self, random: Random) -> Iterator[float]:
        return (index / self.rate_per_s for index in count())


@dataclass(frozen=True)
class Poisson(Arrivals):
    """A Poisson process, as vLLM's benchmarks and Punica's cluster have it."""

    def times_s(self, random: Random) -> Iterator[float]:
        time_s = 0.0
        while True:
            time_s += random.expovariate(self.rate_per_s)
            yield time_s


@dataclass(frozen=True)
class Gamma(Arrivals):
    """A renewal process of Gamma intervals: shape 1/cv², scale cv²/rate.

    The process began long ago: 0 lies anywhere in an interval, more often in a longer one (whose
    length is a Gamma of shape 1/cv² + 1). With a request at 0, the mean number in T seconds would
    exceed rate · T by up to (cv² - 1)/2 for each adapter.

    Attributes:
        cv: the coefficient of variation of the intervals; 1 is Poisson, more is burstier.

    Source: S-LoRA §7.2. vLLM's `burstiness` is the shape, 1/cv².
    """

    cv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("cv", self.cv)

    def times_s(self, random: Random) -> Iterator[float]:
        shape, scale_s = 1 / self.cv**2, self.cv**2 / self.rate_per_s
        time_s = random.random() * random.gammavariate(shape + 1, scale_s)
        while True:
            yield time_s
            time_s += random.gammavariate(shape, scale_s)


@dataclass(frozen=True)
class Bursty(Arrivals):
    """A Poisson process whose rate is drawn from a Gamma distribution for every `period_s`.

    The number of requests in a period has mean n = rate · period and variance n + (cv · n)², that
    of Poisson and of the rate. BurstGPT, the trace of Azure's GPT services that FlexLLM v2 §8
    replays, has calm and busy times; the papers give neither `cv` nor `period_s`.

    Attributes:
        cv: the coefficient of variation of the rate.
        period_s: the seconds that a rate holds.
    """

    cv: float
    period_s: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("cv", self.cv)
        require_positive("period_s", self.period_s)

    def times_s(self, random: Random) -> Iterator[float]:
        shape, scale = 1 / self.cv**2, self.cv**2 * self.rate_per_s
        for period in count():
            rate_per_s = random.gammavariate(shape, scale)
            if rate_per_s == 0.0:  # a draw can be too small for a float
                continue
            time_s, end_s = period * self.period_s, (period + 1) * self.period_s
            while (time_s := time_s + random.expovariate(rate_per_s)) < end_s:
                yield time_s


@dataclass(frozen=True)
class RateCurve(Arrivals):
    """A Poisson process whose rate follows straight lines between points, periodically.

    Attributes:
        period_s: the period of the curve, seconds.
        heights: rates relative to each other, at equal distances from 0 to `period_s`; (0, 1, 0)
            rises and falls as Punica's cluster hour does (§7.3).
    """

    period_s: float
    heights: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("period_s", self.period_s)
        fine = all(0 <= height < math.inf for height in self.heights)
        if len(self.heights) < 2 or not fine or not any(self.heights):
            raise BenchmarkError(
                f"heights={self.heights}; use at least two finite numbers of at least 0, one above"
            )

    def rate_at(self, time_s: float) -> float:
        """Return the rate at a time, requests a second."""
        pieces = len(self.heights) - 1
        place = time_s % self.period_s / self.period_s * pieces
        left = min(int(place), pieces - 1)
        low, high = self.heights[left : left + 2]
        return self._scale * (low + (high - low) * (place - left))

    @property
    def _scale(self) -> float:
        """The factor from heights to rates."""
        areas = sum((low + high) / 2 for low, high in pairwise(self.heights))
        return self.rate_per_s * (len(self.heights) - 1) / areas

    def times_s(self, random: Random) -> Iterator[float]:
        # Thinning: of the requests of the highest rate, each stays with probability rate / highest.
        highest = self._scale * max(self.heights)
        time_s = 0.0
        while True:
            time_s += random.expovariate(highest)
            if random.random() * highest < self.rate_at(time_s):
                yield time_s

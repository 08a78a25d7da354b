"""Distributions of synthetic workloads: arrivals, lengths, and the popularity of adapters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from random import Random
from statistics import NormalDist

from pcg.errors import BenchmarkError
from pcg.simulate.workload import require_count, require_positive


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
        """Yield arrival times from 0 on, in seconds, without end."""


@dataclass(frozen=True)
class Constant(Arrivals):
    """A request every 1/rate, the first at 0."""

    def times_s(self, random: Random) -> Iterator[float]:
        return (index / self.rate_per_s for index in count())


@dataclass(frozen=True)
class Poisson(Arrivals):
    """A Poisson process, as in vLLM's benchmarks and in Punica's cluster."""

    def times_s(self, random: Random) -> Iterator[float]:
        time_s = 0.0
        while True:
            time_s += random.expovariate(self.rate_per_s)
            yield time_s


@dataclass(frozen=True)
class Gamma(Arrivals):
    """A renewal process of Gamma intervals: shape 1/cv², scale cv²/rate.

    The process is stationary: 0 lies anywhere in an interval, more often in a longer interval
    (whose length is a Gamma of shape 1/cv² + 1). With a request at 0, the mean number in T seconds
    would exceed rate · T by up to (cv² - 1)/2 for each adapter.

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
    """A Poisson process with a new rate, drawn from a Gamma distribution, in every `period_s`.

    The number of requests in a period has mean n = rate · period and variance n + (cv · n)², the
    sum of the Poisson's and the rate's. BurstGPT, the trace of Azure's GPT services that FlexLLM v2
    §8 replays, has calm and busy times; the papers give neither `cv` nor `period_s`.

    Attributes:
        cv: the coefficient of variation of the rate.
        period_s: the duration of a rate, seconds.
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
    """A Poisson process with a periodic, piecewise linear rate.

    Attributes:
        period_s: the period of the curve, seconds.
        heights: rates relative to each other, at equal distances from 0 to `period_s`; (0, 1, 0)
            rises and falls like Punica's cluster hour (§7.3).
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
        areas = sum((low + high) / 2 for low, high in pairwise(self.heights))
        return self.rate_per_s * (len(self.heights) - 1) / areas

    def times_s(self, random: Random) -> Iterator[float]:
        # Thinning: keep each request of the highest rate with probability rate / highest.
        highest = self._scale * max(self.heights)
        time_s = 0.0
        while True:
            time_s += random.expovariate(highest)
            if random.random() * highest < self.rate_at(time_s):
                yield time_s


# ------------------------------------------------------------------------------------------ lengths


_NORMAL = NormalDist()


class Lengths(ABC):
    """A distribution of lengths of at least one token."""

    @abstractmethod
    def draw(self, random: Random) -> int:
        """Return a length, in tokens."""


@dataclass(frozen=True)
class Fixed(Lengths):
    """The distribution with a single length."""

    tokens: int

    def __post_init__(self) -> None:
        require_count("tokens", self.tokens)

    def draw(self, random: Random) -> int:
        return self.tokens


@dataclass(frozen=True)
class Between(Lengths):
    """The uniform distribution from `least` to `most`, inclusive, such as S-LoRA's U[8, 512]."""

    least: int
    most: int

    def __post_init__(self) -> None:
        require_count("least", self.least)
        require_count("most", self.most, self.least)

    def draw(self, random: Random) -> int:
        return random.randint(self.least, self.most)


@dataclass(frozen=True)
class LogNormal(Lengths):
    """A log-normal distribution, given by two quantiles and truncated at `most`.

    ln(length) has mean ln(median) and standard deviation ln(p90 / median) / 1.2816; lengths are
    rounded to whole tokens.

    Attributes:
        median: the median before truncation, tokens.
        p90: the 90th percentile before truncation, tokens.
        most: the longest length, tokens; None for no truncation.
    """

    median: float
    p90: float
    most: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.median < self.p90 < math.inf:
            raise BenchmarkError(
                f"median={self.median} and p90={self.p90}; use a median of at least 1 and a longer "
                "p90"
            )
        if self.most is not None:
            require_count("most", self.most)
            if self.share_below < 1e-6:
                raise BenchmarkError(
                    f"most={self.most}, and of lengths with median={self.median} and "
                    f"p90={self.p90} less than one in a million is as short; use shorter ones"
                )

    @property
    def sigma(self) -> float:
        """The standard deviation of ln(length)."""
        return math.log(self.p90 / self.median) / _NORMAL.inv_cdf(0.9)

    @property
    def share_below(self) -> float:
        """The share of lengths up to `most`, before truncation."""
        if self.most is None:
            return 1.0
        return _NORMAL.cdf(math.log(self.most / self.median) / self.sigma)

    def draw(self, random: Random) -> int:
        share = (random.getrandbits(52) + 0.5) / 2**52  # above 0 and below 1
        length = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share * self.share_below))
        return max(1, round(length))


SHAREGPT_PROMPTS = LogNormal(1730, 5696)
SHAREGPT_OUTPUTS = LogNormal(415, 834)
"""ShareGPT's multi-turn chats, where the prompt is the conversation so far.

Median and 90th percentile are those of Sarathi-Serve's table 2 (OSDI 2024, openchat_sharegpt4),
which FlexLLM v2 §8 follows. Log-normal lengths, and independent prompts and outputs, are
assumptions of pcg. A model with a short context needs `replace(…, most=…)`.
"""

SHAREGPT_FIRST_PROMPTS = LogNormal(98, 353, 2048)
SHAREGPT_FIRST_OUTPUTS = LogNormal(278, 618, 2048)
"""ShareGPT's chats cut into single turns: means of 161 and 338 tokens (vLLM, SOSP 2023, figure 11).

Log-normal lengths, ln(length) with standard deviations of 1 and 0.625, and independent prompts and
outputs are assumptions of pcg.
"""


# --------------------------------------------------------------------------------------- popularity


class Popularity(ABC):
    """A distribution of requests over adapters."""

    @abstractmethod
    def shares(self, requests: int) -> tuple[float, ...]:
        """Return each adapter's share of the requests, the largest first; they sum to 1."""

    def counts(self, requests: int) -> tuple[int, ...]:
        """Return the numbers of requests nearest to the shares (largest remainders).

        Raises:
            BenchmarkError: `requests` is not a whole number of at least 1.
        """
        require_count("requests", requests)
        exact = [share * requests for share in self.shares(requests)]
        counts = [int(number) for number in exact]
        # Rounding may leave a share of 1/n slightly below one request; the remainders correct that.
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for index in by_remainder[: requests - sum(counts)]:
            counts[index] += 1
        return tuple(counts)

    def order(self, requests: int, random: Random) -> list[int]:
        """Return each request's adapter, as its rank by popularity: `counts`, shuffled."""
        drawn = [index for index, many in enumerate(self.counts(requests)) for _ in range(many)]
        random.shuffle(drawn)
        return drawn


@dataclass(frozen=True)
class Distinct(Popularity):
    """Each request has its own adapter."""

    def shares(self, requests: int) -> tuple[float, ...]:
        return (1 / requests,) * requests


@dataclass(frozen=True)
class Uniform(Popularity):
    """All adapters are equally popular.

    Attributes:
        adapters: the number of adapters; None for ⌈√requests⌉, as in Punica.
    """

    adapters: int | None = None

    def __post_init__(self) -> None:
        if self.adapters is not None:
            require_count("adapters", self.adapters)

    def shares(self, requests: int) -> tuple[float, ...]:
        many = self.adapters or math.isqrt(requests - 1) + 1
        return (1 / many,) * many


@dataclass(frozen=True)
class Skewed(Popularity):
    """Each adapter has `ratio` times the requests of the next: a geometric sequence.

    The number of adapters is the largest that leaves the last adapter at least one request. Punica
    calls this distribution Zipf-α; Zipf's own law is `PowerLaw`.

    Attributes:
        ratio: Punica's α, above 1.
    """

    ratio: float = 1.5

    def __post_init__(self) -> None:
        if not 1 < self.ratio < math.inf:
            raise BenchmarkError(
                f"ratio={self.ratio}; use a finite number above 1, as Punica's 1.5"
            )

    def shares(self, requests: int) -> tuple[float, ...]:
        # 1 + α + … + α^(m-1) = (α^m - 1) / (α - 1) ≤ requests
        most = math.log(requests * (self.ratio - 1) + 1) / math.log(self.ratio)
        many = max(1, math.floor(most + 1e-9))
        sizes = [self.ratio**-index for index in range(many)]
        whole = math.fsum(sizes)
        return tuple(size / whole for size in sizes)


@dataclass(frozen=True)
class Identical(Popularity):
    """All requests use the same adapter."""

    def shares(self, requests: int) -> tuple[float, ...]:
        return (1.0,)


@dataclass(frozen=True)
class PowerLaw(Popularity):
    """The i-th of `adapters` has a share ∝ i^-exponent: Zipf's law.

    Attributes:
        adapters: the number of adapters; some may get no request.
        exponent: S-LoRA's α; 0 is uniform.
    """

    adapters: int
    exponent: float = 1.0

    def __post_init__(self) -> None:
        require_count("adapters", self.adapters)
        if not 0 <= self.exponent < math.inf:
            raise BenchmarkError(f"exponent={self.exponent}; use a finite number of at least 0")

    def shares(self, requests: int) -> tuple[float, ...]:
        sizes = [place**-self.exponent for place in range(1, self.adapters + 1)]
        whole = math.fsum(sizes)
        return tuple(size / whole for size in sizes)

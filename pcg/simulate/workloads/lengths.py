"""Distributions of the lengths of prompts and outputs, in tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.checks import require_count

_NORMAL = NormalDist()


class Lengths(ABC):
    """A distribution of lengths of at least one token."""

    @abstractmethod
    def draw(self, random: Random) -> int:
        """Return one length, in tokens."""


@dataclass(frozen=True)
class Fixed(Lengths):
    """The distribution of one length alone."""

    tokens: int

    def __post_init__(self) -> None:
        require_count("tokens", self.tokens)

    def draw(self, random: Random) -> int:
        return self.tokens


@dataclass(frozen=True)
class Between(Lengths):
    """The uniform distribution from `least` to `most`, both included, as S-LoRA's U[8, 512]."""

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
which FlexLLM v2 §8 follows. That lengths are log-normal, and prompts and outputs independent, is
our assumption. A model with a short context needs `replace(…, most=…)`.
"""

SHAREGPT_FIRST_PROMPTS = LogNormal(98, 353, 2048)
SHAREGPT_FIRST_OUTPUTS = LogNormal(278, 618, 2048)
"""ShareGPT's chats cut into single turns: means of 161 and 338 tokens (vLLM, SOSP 2023, figure 11).

That lengths are log-normal, ln(length) with standard deviations of 1 and 0.625, and prompts and
outputs independent, is our assumption.
"""

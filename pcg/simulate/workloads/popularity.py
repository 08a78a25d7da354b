"""The popularity of adapters: how many of n requests are for each.

Distinct    each request has an adapter of its own                      Punica §7
Uniform     ⌈√n⌉ adapters, as many requests each                        Punica §7
Skewed      each adapter has 1.5 times the requests of the next         Punica §7, "Zipf-1.5"
Identical   one adapter                                                 Punica §7
PowerLaw    adapter i of a given number has a share ∝ i^-α: Zipf's law  S-LoRA §7.2
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.checks import require_count


class Popularity(ABC):
    """A law by which requests choose adapters."""

    @abstractmethod
    def shares(self, requests: int) -> tuple[float, ...]:
        """Return each adapter's share of so many requests, the largest first; they sum to 1."""

    def counts(self, requests: int) -> tuple[int, ...]:
        """Return whole numbers of requests that are nearest to the shares (largest remainders).

        Raises:
            BenchmarkError: `requests` is not a whole number of at least 1.
        """
        require_count("requests", requests)
        exact = [share * requests for share in self.shares(requests)]
        counts = [int(number) for number in exact]
        # Rounding may leave a share of 1/n a hair below one request; the remainders mend that.
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for index in by_remainder[: requests - sum(counts)]:
            counts[index] += 1
        return tuple(counts)

    def order(self, requests: int, random: Random) -> list[int]:
        """Return each request's adapter, by its place from the most popular: `counts`, shuffled."""
        drawn = [index for index, many in enumerate(self.counts(requests)) for _ in range(many)]
        random.shuffle(drawn)
        return drawn


@dataclass(frozen=True)
class Distinct(Popularity):
    """Each request has an adapter of its own."""

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

    There are as many adapters as leave at least one request for the last. Punica calls this Zipf-α;
    Zipf's own law is `PowerLaw`.

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
    """All requests are for one adapter."""

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

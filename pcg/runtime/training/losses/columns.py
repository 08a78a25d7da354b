"""Columns: what losses read beside log-probabilities, a number for each token of some data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """The numbers of the tokens of some data, one datum after the other: [T], fp64.

    Attributes:
        weights: the weight of each token's loss; 0 where nothing is predicted. For tokens with K
            targets each, which linear losses take, [T, K].
        advantages: the advantage of each token.
        sampled: the log-probability that each token had when it was sampled, or of a reference.
        places: the number of each token's datum, int64.
        count: the number of data.
    """

    weights: Tensor
    advantages: Tensor
    sampled: Tensor
    places: Tensor
    count: int

    @property
    def width(self) -> int:
        """The number of targets of a token, K."""
        return 1 if self.weights.dim() == 1 else self.weights.shape[1]

    def log_ratios(self, logprobs: Tensor) -> Tensor:
        """Return log-probabilities less the sampled ones; 0 for tokens without weight, [T]."""
        return (logprobs - self.sampled).where(self.weights != 0, 0.0)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum over the tokens of each datum, [count]."""
        return x.new_zeros(self.count).index_add(0, self.places, x)

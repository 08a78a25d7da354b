"""How long work takes: f(c, s) of FlexLLM's hybrid token scheduler, corrected as steps are seen.

    forward of a step          f = a₀ + a₁ · tokens + a₂ · keys
    backward of a unit         g = b₀ + b₁ · tokens + b₂ · keys          (one layer of one window)

keys: the sum over tokens of the tokens that each attends to. The coefficients are fitted to what
was observed by recursive least squares with forgetting, relative to what was foretold, so that
short steps count as much as long ones.
"""

from __future__ import annotations

from dataclasses import dataclass

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a kind.

    Attributes:
        tokens: that go through the program.
        keys: that attention reads for them, summed over tokens.
    """

    tokens: int = 0
    keys: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens, self.keys + other.keys)

    @classmethod
    def of(cls, tokens: int, context: int) -> Load:
        """Of new tokens behind a context."""
        return cls(tokens, keys_of(tokens, context))


def keys_of(tokens: int, context: int) -> int:
    """Keys that attention reads for new tokens behind a context, summed over tokens."""
    return tokens * context + tokens * (tokens + 1) // 2


class Latency:
    """Foretells the seconds of one kind of work, and learns from what it took."""

    def __init__(self, constant_s: float, token_s: float, key_s: float) -> None:
        """Begin with an estimate.

        Args:
            constant_s: of any amount.
            token_s: of a token.
            key_s: of a key that a token attends to.
        """
        self._scales: Vector = (constant_s, token_s, key_s)
        self._factors = [1.0, 1.0, 1.0]
        # Factors of the estimate are known to about 1 at first.
        self._covariance = [[float(i == j) for j in range(3)] for i in range(3)]

    @property
    def coefficients_s(self) -> Vector:
        """Seconds of anything, of a token, of a key."""
        a, b, c = (f * s for f, s in zip(self._factors, self._scales, strict=True))
        return a, b, c

    def seconds(self, load: Load) -> float:
        """What a load takes."""
        a, b, c = self.coefficients_s
        return a + b * load.tokens + c * load.keys

    def tokens_within(self, seconds: float, context: int, load: Load) -> int:
        """The most tokens behind a context that fit into a time beside a load; may be negative."""
        _, token_s, key_s = self.coefficients_s
        left = seconds - self.seconds(load)
        per_token = token_s + key_s * context
        if left <= 0 or per_token <= 0:
            return 0 if left <= 0 else 2**31
        # left = s · per_token + key_s · s² / 2
        if key_s <= 0:
            return int(left / per_token)
        root: float = (per_token**2 + 2 * key_s * left) ** 0.5
        return int((root - per_token) / key_s)

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a load that took so long."""
        foretold = self.seconds(load)
        if foretold <= 0 or seconds <= 0:
            return
        a, b, c = self._scales
        # Relative: an error of a tenth weighs the same for every load.
        x = (a / foretold, b * load.tokens / foretold, c * load.keys / foretold)
        spread = [sum(p * v for p, v in zip(row, x, strict=True)) for row in self._covariance]
        # While loads are alike, forgetting would only make what they do not show uncertain.
        forget = _FORGET if sum(self._covariance[i][i] for i in range(3)) < _MOST_SPREAD else 1.0
        gain_by = forget + sum(s * v for s, v in zip(spread, x, strict=True))
        error = max(-_MOST_ERROR, min(_MOST_ERROR, seconds / foretold - 1.0))
        for i in range(3):
            self._factors[i] += spread[i] / gain_by * error
            self._factors[i] = max(self._factors[i], _LEAST_FACTOR)
        self._covariance = [
            [(self._covariance[i][j] - spread[i] * spread[j] / gain_by) / forget for j in range(3)]
            for i in range(3)
        ]


_FORGET = 0.98
"""What an observation still weighs after the next one: about fifty count."""
_MOST_ERROR = 1.0
"""Relative error above which an observation is an outlier: something else held the machine up."""
_LEAST_FACTOR = 0.02
"""Of the first estimate; nothing becomes free."""
_MOST_SPREAD = 3.0
"""Variances of the factors together, as at first: nothing gets less certain than the estimate."""

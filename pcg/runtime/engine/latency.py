"""Latencies: predicted times of work, f(c, s) of FlexLLM's hybrid token scheduler, learned online.

    forward of a step    f = a₀ + a₁ tokens + a₂ keys + a₃ sampled + a₄ trained + a₅ windows
    backward of units    g = b₀ + b₁ tokens + b₂ keys    (one layer, a window of each of some jobs)

keys: the sum over tokens of the tokens that each attends to. sampled: rows of logits. a₄ is the
loss of a trained token, forward and back through the head; a₅ the constant time of a window, in
which the head's weights are read and its own operators launched. The coefficients are fitted to
observations by recursive least squares with forgetting, relative to the prediction, so that short
steps count as much as long ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcg.runtime.model.load import Load

Vector = tuple[float, ...]


class Latency:
    """Predicts the seconds of one kind of work, and learns from observations.

    The arguments are the first estimates of the coefficients; one of 0 is not learned.
    """

    def __init__(
        self,
        constant_s: float,
        token_s: float,
        key_s: float,
        sampled_s: float = 0.0,
        trained_s: float = 0.0,
        window_s: float = 0.0,
    ) -> None:
        self._scales: Vector = (constant_s, token_s, key_s, sampled_s, trained_s, window_s)
        self._factors = [1.0] * len(self._scales)
        # At first each factor of the estimate has a standard deviation of 1.
        places = range(len(self._scales))
        self._covariance = [[float(i == j and self._scales[i] > 0) for j in places] for i in places]
        # The trace of the covariance is kept below that of the estimate.
        self._most_spread = sum(self._covariance[i][i] for i in places)

    @property
    def coefficients_s(self) -> Vector:
        """Seconds of the constant, a token, a key, a row of logits, a token's loss, a window."""
        return tuple(f * s for f, s in zip(self._factors, self._scales, strict=True))

    def seconds(self, load: Load) -> float:
        a, b, c, d, e, w = self.coefficients_s
        of_rows = d * load.sampled + e * load.trained + w * load.windows
        return a + b * load.tokens + c * load.keys + of_rows

    def tokens_within(
        self,
        seconds: float,
        context: int,
        load: Load,
        is_trained: bool = False,
        are_read: bool = False,
    ) -> int:
        """Return the most tokens that fit into a time beside a load; may be negative.

        Args:
            load: the load beside them, which includes what comes with any number of tokens: a row
                of logits after a prompt, a window.
            is_trained: True if the loss of each is computed.
            are_read: True if the logits of each are computed.
        """
        _, token_s, key_s, sampled_s, trained_s, _ = self.coefficients_s
        left = seconds - self.seconds(load)
        per_token = token_s + key_s * context + trained_s * is_trained + sampled_s * are_read
        if left <= 0 or per_token <= 0:
            return 0 if left <= 0 else 2**31
        # left = s · per_token + key_s · s² / 2
        if key_s <= 0:
            return int(left / per_token)
        root: float = (per_token**2 + 2 * key_s * left) ** 0.5
        return int((root - per_token) / key_s)

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a load that took so long."""
        predicted = self.seconds(load)
        if predicted <= 0 or seconds <= 0:
            return
        # Relative: an error of a tenth weighs the same for every load.
        amounts = (1, load.tokens, load.keys, load.sampled, load.trained, load.windows)
        x = [s * amount / predicted for s, amount in zip(self._scales, amounts, strict=True)]
        covariance, places = self._covariance, range(len(x))
        spread = [sum(p * v for p, v in zip(row, x, strict=True)) for row in covariance]
        # While loads are alike, forgetting would only make the other factors uncertain.
        is_certain = sum(covariance[i][i] for i in places) < self._most_spread
        forget = _FORGET if is_certain else 1.0
        gain_by = forget * _NOISE + sum(s * v for s, v in zip(spread, x, strict=True))
        error = max(-_MOST_ERROR, min(_MOST_ERROR, seconds / predicted - 1.0))
        for i in places:
            self._factors[i] += spread[i] / gain_by * error
            self._factors[i] = max(self._factors[i], _LEAST_FACTOR)
        self._covariance = [
            [(covariance[i][j] - spread[i] * spread[j] / gain_by) / forget for j in places]
            for i in places
        ]


@dataclass
class Latencies:
    """Latencies of a step's forward, and of backward units of one layer that run together."""

    forward: Latency
    backward: Latency


_FORGET = 0.98
"""The weight of an observation after the next one: about fifty count."""
_NOISE = 0.1
"""Variance of relative errors, relative to the uncertainty of the factors."""
_MOST_ERROR = 1.0
"""The relative error that outliers are cut to, as when something else held the machine up."""
_LEAST_FACTOR = 0.02
"""The least factor of the first estimate: nothing becomes free."""


_MOST_RESERVE = 0.25
"""The largest reserve, relative to the TPOT SLO: one long hold-up is not worth more."""
_RESERVE_DECAY = 0.98
"""Decay of the reserve after a step that needed none of it."""


class Reserve:
    """The part of the slack that is kept back, as steps with finetuning overran their prediction.

    A prediction is of the mean step, without what follows from a unit, such as an optimizer's
    step. A request whose last step overran cannot make up for it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, over_s: float, tpot_slo_s: float) -> None:
        """Note by how much a step overran its prediction."""
        self.seconds = max(min(over_s, _MOST_RESERVE * tpot_slo_s), _RESERVE_DECAY * self.seconds)

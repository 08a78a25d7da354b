"""Latencies: predicted times of work, f(c, s) of FlexLLM's hybrid token scheduler, learned online.

    forward of a step    f = a₀ + a₁ tokens + a₂ keys + a₃ sampled + a₄ trained + a₅ windows + r + h
    parts of jobs        g = b₀ + b₁ tokens + b₂ keys + h
    both                 h = c max(0, tokens - knee)
    forward              r = d read
    the last part of a pass, with the update that follows    g + b₃

A step that is replayed from graphs takes the host less time than an eager step, and steps with
prompts are padded to other sizes than steps that only decode. So a₀ has three values: for eager
steps, for replayed steps that only decode, and for replayed steps with prompts or windows. Each
value starts from that of eager steps and is learned from steps of its kind. A step is predicted to
be replayed if the latest step of its kind was.

keys: the sum over tokens of the tokens that each attends to; read: the keys of each sequence,
counted once, as a chunk reads them little more often than a single token. sampled: rows of logits.
a₄ is the additional time of a window's token, which is saved for backward; a₅ the constant time of
a window, which launches operators of its own. knee: on a GPU, few tokens take little more than
reading the base's weights, and beyond the knee each token takes its own computation. Parts have b
for each phase: a layer forward or back, of a window of each of several jobs, and the loss of some
tokens. Recursive least squares with forgetting fit the coefficients, relative to the prediction, so
that short steps count as much as long steps.
"""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from pcg.runtime.requests.step import Load
from pcg.runtime.training.work_units import Phase

Vector = tuple[float, ...]


class Reserve:
    """The share r of a promised gap that steps leave free, as predictions estimate the mean.

    r rises by η (1 - a) after a gap that exceeded its SLO because a step was filled, and falls by
    η a after every other gap, where a is half of the allowed share of missed gaps (Gibbs and
    Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021): for any errors, the
    share of missed gaps tends to a. r also falls while no work fits, and has a maximum.
    """

    def __init__(self) -> None:
        self.share = _RESERVE

    def within(self, seconds: float) -> float:
        """Return the limit of a step's predicted time for ending within `seconds`."""
        return (1 - self.share) * seconds

    def observe(self, is_missed: bool, percentile: float) -> None:
        """Learn from a gap; `percentile`: the percentage of gaps to keep."""
        missed = (1 - percentile / 100) / 2
        self.share += _RATE * ((1 - missed) if is_missed else -missed)
        self.share = min(max(self.share, 0.0), _MOST_RESERVE)


class Knee(NamedTuple):
    """The number of tokens beyond which each takes `token_s` more; 0 without a knee."""

    token_s: float = 0.0
    tokens: int = 0


class Latency:
    """Predicts the time of a kind of work, and learns from observations.

    The arguments are initial estimates of the coefficients; a coefficient of 0 is not learned.

    Attributes:
        reserve: the share of a gap to leave free.
        known: the numbers of tokens of parts that ran.
    """

    def __init__(  # noqa: PLR0913 (one for each term of the equation)
        self,
        constant_s: float,
        token_s: float,
        key_s: float,
        sampled_s: float = 0.0,
        trained_s: float = 0.0,
        window_s: float = 0.0,
        beyond_s: float = 0.0,
        knee: float = 0.0,
        read_s: float = 0.0,
    ) -> None:
        self._knee = int(knee)
        self._scales: Vector = (
            *(constant_s, token_s, key_s, sampled_s, trained_s, window_s, beyond_s),
            *(constant_s, constant_s, read_s, constant_s),
        )
        self._factors = [1.0] * len(self._scales)
        self._learned_s = list(self._scales)
        self.reserve = Reserve()
        self.known: set[int] = set()
        # At first each factor of the estimate has a standard deviation of 1.
        places = range(len(self._scales))
        self._covariance = [[float(i == j and self._scales[i] > 0) for j in places] for i in places]
        for place in _REPLAYED.values():
            self._covariance[place][place] = 0.0
        self._covariance[_ENDS][_ENDS] *= _UPDATE**2  # an update may take far longer than a part
        # The trace of the covariance is kept below that of the estimate.
        self._most_spread = sum(self._covariance[i][i] for i in places[:_ENDS])
        # Whether the latest step was replayed, by whether it only decoded.
        self._is_replayed = {True: False, False: False}

    @property
    def coefficients_s(self) -> Vector:
        """Seconds of the constant, a token, a key, a row of logits, a token's loss, a window."""
        return tuple(self._learned_s[:_BEYOND])

    @property
    def knee(self) -> Knee:
        """The knee: a number of tokens, and the additional time of each token beyond it."""
        return Knee(self._learned_s[_BEYOND], self._knee)

    @property
    def read_s(self) -> float:
        """Seconds of a key that a sequence reads, in addition to those of attending tokens."""
        return self._learned_s[_READ]

    def scaled(self, factor: float) -> Latency:
        """Return a latency that starts with these coefficients times a factor."""
        begin_s = (*self.coefficients_s, self.knee.token_s)
        return Latency(*[*(factor * part for part in begin_s), self._knee, factor * self.read_s])

    def seconds(self, load: Load) -> float:
        """Return the expected time of a load."""
        seconds: float = sum(map(mul, self._learned_s, self._amounts(load)))
        return seconds

    def _amounts(self, load: Load) -> list[float]:
        tokens, beyond = load.tokens, load.tokens - self._knee
        amounts = [0.0, tokens, load.keys, load.sampled, load.trained, load.windows]
        amounts += [beyond if beyond > 0 else 0, 0.0, 0.0, load.read, load.ends]
        only_decodes = not (load.chunks or load.windows)
        amounts[_REPLAYED[only_decodes] if self._is_replayed[only_decodes] else _EAGER] = 1.0
        return amounts

    def tokens_within(
        self,
        seconds: float,
        context: int,
        load: Load,
        is_trained: bool = False,
        are_read: bool = False,
    ) -> int:
        """Return the maximum number of tokens predicted to fit into a time, on top of a load.

        Args:
            load: the other load, with the constant part of the tokens: a row of logits after a
                prompt, a window.
            is_trained: True if the loss of each token is computed.
            are_read: True if the logits of each token are computed.
        """
        _, token_s, key_s, sampled_s, trained_s, _, beyond_s, _, _, read_s, _ = self._learned_s
        left = seconds - self.seconds(load) - read_s * context
        of_loss_s = trained_s * is_trained + sampled_s * are_read
        per_token = token_s + read_s + key_s * context + of_loss_s
        if left <= 0:
            return 0
        cheap = max(0, self._knee - load.tokens)
        tokens = _most_tokens(left, per_token, key_s)
        if tokens <= cheap or beyond_s <= 0:
            return tokens
        return _most_tokens(left + beyond_s * cheap, per_token + beyond_s, key_s)

    def observe(self, load: Load, seconds: float, is_replayed: bool = False) -> None:
        """Learn from a load that took `seconds`; `is_replayed` if graphs ran all of it."""
        only_decodes = not (load.chunks or load.windows)
        self._is_replayed[only_decodes] = is_replayed
        constant = _REPLAYED[only_decodes] if is_replayed else _EAGER
        if constant != _EAGER:
            self._begin_constant(constant)
        amounts = self._amounts(load)
        predicted = sum(map(mul, self._learned_s, amounts))
        if predicted <= 0 or seconds <= 0:
            return
        # Relative: an error of a tenth weighs the same for every load.
        x = [scale * n / predicted for scale, n in zip(self._scales, amounts, strict=True)]
        # What was learned of the constants of other kinds stays.
        counted = [place == constant or place not in _CONSTANTS for place in range(len(x))]
        if load.ends:  # the first layer needs no gradient of its inputs, and an update may follow
            ends = x[_ENDS]
            x, counted = [0.0] * len(x), [False] * len(x)
            x[_ENDS], counted[_ENDS] = ends, True
        covariance = self._covariance
        spread_before = 0.0
        for place in range(_ENDS):
            spread_before += covariance[place][place]
        # While loads are alike, forgetting would only make the other factors uncertain.
        forget = _FORGET if spread_before < self._most_spread else 1.0
        error = max(-_MOST_ERROR, min(_MOST_ERROR, seconds / predicted - 1.0))
        while True:
            spread = [sum(map(mul, row, x)) for row in covariance]
            gain_by = forget * _NOISE + sum(map(mul, spread, x))
            moved = [f + s / gain_by * error for f, s in zip(self._factors, spread, strict=True)]
            # A factor that would fall below the least leaves its share to the others.
            fallen = [i for i, factor in enumerate(moved) if x[i] and factor < _LEAST_FACTOR]
            if not fallen:
                break
            for i in fallen:
                x[i] = 0.0
        for place, factor in enumerate(moved):
            self._factors[place] = factor if factor > _LEAST_FACTOR else _LEAST_FACTOR
            self._learned_s[place] = self._factors[place] * self._scales[place]
        self._forget(spread, gain_by, counted, forget)

    def _forget(
        self, spread: list[float], gain_by: float, counted: list[bool], forget: float
    ) -> None:
        """Reduce the covariance by an observation, and increase it by forgetting."""
        kept = (1.0, forget**0.5, forget)
        for i, row in enumerate(self._covariance):
            own_spread, is_counted = spread[i], counted[i]
            for j, before in enumerate(row):
                row[j] = (before - own_spread * spread[j] / gain_by) / kept[is_counted + counted[j]]

    def _begin_constant(self, place: int) -> None:
        """Start learning the constant of a kind of steps, from the constant of eager steps."""
        if not self._covariance[place][place] and self._scales[place] > 0:
            self._factors[place] = self._factors[_EAGER]
            self._learned_s[place] = self._factors[place] * self._scales[place]
            self._covariance[place][place] = 1.0
            self._most_spread += 1.0


def _most_tokens(seconds: float, per_token: float, key_s: float) -> int:
    """Return the greatest s with s · per_token + key_s · s² / 2 ≤ seconds."""
    if per_token <= 0:
        return 2**31
    if key_s <= 0:
        return int(seconds / per_token)
    root: float = (per_token**2 + 2 * key_s * seconds) ** 0.5
    return int((root - per_token) / key_s)


class Latencies:
    """Latencies of a step's forward, and of parts of jobs that run together.

    Attributes:
        forward: latency of requests and whole windows.
        backward, loss, layer: latencies of parts; `layer` is the forward of a window's layer.
        longest: maximum number of tokens of a window so far, whole or in parts.
    """

    def __init__(
        self,
        forward: Latency,
        backward: Latency,
        loss: Latency | None = None,
        layer: Latency | None = None,
    ) -> None:
        """Set initial estimates; by default, a layer's forward is half of its backward."""
        _, token_s, _, row_s, *_ = forward.coefficients_s
        self.forward = forward
        self.backward = backward
        self.longest = 0
        self.loss = Latency(0.0, max(token_s, 2 * row_s), 0.0) if loss is None else loss
        self.layer = backward.scaled(0.5) if layer is None else layer

    @property
    def reserve(self) -> Reserve:
        return self.forward.reserve

    def of(self, phase: Phase) -> Latency:
        """Return the latency of parts of a phase."""
        parts = {Phase.FORWARD: self.layer, Phase.LOSS: self.loss, Phase.BACKWARD: self.backward}
        return parts[phase]

    @classmethod
    def guessed(cls, load: Load, took_s: float, layers: int) -> Latencies:
        """Return initial latencies from the time of a single step.

        Assumptions: half of the time is constant, and a quarter is due to tokens; 1,000 keys cost
        as much as a token, and backward takes twice as long. Later steps correct errors of up to 50
        times, too short predictions more slowly.
        """
        constant_s, token_s = took_s / 2, took_s / 4 / max(load.tokens, 1)
        key_s, row_s = token_s / 1000, token_s
        of_windows = token_s / 20, constant_s / 20
        forward = Latency(constant_s, token_s, key_s, row_s, *of_windows, read_s=key_s)
        backward = Latency(*(2 * part / layers for part in (constant_s, token_s, key_s / 10)))
        return cls(forward, backward)


_EAGER, _BEYOND, _REPLAYED, _READ, _ENDS = 0, 6, {True: 7, False: 8}, 9, 10
"""Places of coefficients: the constant of eager steps, a token beyond the knee, constants of
replayed steps by whether they only decode, a key that a sequence reads, and the end of a pass."""
_CONSTANTS = {_EAGER, *_REPLAYED.values(), _ENDS}
_FORGET = 0.98
"""The weight of an observation after the next one: about fifty count."""
_NOISE = 0.1
"""Variance of relative errors, relative to the uncertainty of the factors."""
_MOST_ERROR = 1.0
"""The limit of relative errors, for outliers such as a machine busy with other work."""
_UPDATE = 10.0
"""The standard deviation of the first estimate of an update, relative to a part's constant."""
_LEAST_FACTOR = 0.02
"""The minimum of a coefficient, relative to its first estimate."""
_RESERVE, _MOST_RESERVE = 0.1, 0.5
"""The first and the largest reserve."""
_RATE = 0.02
"""The rate η at which the reserve follows errors."""

"""Co-serving: as much finetuning as fits beside requests (FlexLLM v2 §6.2)."""

from __future__ import annotations

import math

from pcg.errors import FinetuneError
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.sharing.rule import Sharing
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.engine.sharing.time_account import TimeAccount
from pcg.runtime.model.load import Load
from pcg.runtime.model.margins import kind_of
from pcg.runtime.training.work_units import Forward, Part, Phase


class CoServing(Sharing):
    """Fits as much as the SLOs allow: s = argmax f(c, s) ≤ SLO, and units in the remaining time.

    A window of s tokens takes C for itself, forward and in each layer's backward, and m a token:

        efficiency    e(s) = s · m / (C + s · m)

    A step with room for s, which would have room for S with all the time that a step can have,
    runs a window if

        e(s) ≥ d · min(e(S), 0.93)

    and otherwise leaves the room to later steps. The demand d falls from 0.99 with every step
    without a window, so that windows come however small the rooms stay, and rises again with larger
    ones. The rest of a batch is split evenly over the windows that it needs.

    Args:
        burst: how many times the TPOT SLO a gap between a request's tokens may last; 1 bounds every
            gap by the SLO, and more bounds the mean of a request's gaps. docs/engine.md shows what
            that gains and costs.

    Raises:
        FinetuneError: burst is below 1.
    """

    def __init__(self, burst: float = 1.0) -> None:
        if not burst >= 1:
            raise FinetuneError(f"burst={burst:g}; use at least 1, the TPOT SLO itself")
        self.burst = burst
        self._demand = _DEMAND
        self._last = 0
        self._room_s: float | None = None
        self._account = TimeAccount()

    def _share_of(self, step: Step) -> float | None:
        """Return the share of the time that finetuning has; None where it has what is left."""
        is_free = step.is_served and step.tpot_slo_s is None
        return step.limits.finetuning_share if is_free else None

    def begin(self, step: Step) -> None:
        self._account.begin(step, self._share_of(step))
        if step.latencies is None or step.gap_s == math.inf:
            return
        step.latencies.pass_step()
        room_s = step.left_s(self.burst) - step.ahead_s()
        if room_s > 0:
            before_s = room_s if self._room_s is None else self._room_s
            self._room_s = before_s + _SMOOTHING * (room_s - before_s)

    def _keeps_gaps(self, step: Step) -> bool:
        """Return True where time that a step leaves is lost: there is a promise for each gap."""
        return self.burst == 1 and step.is_served and step.tpot_slo_s is not None

    def forward(self, step: Step, unit: Forward) -> int:
        latencies = step.latencies
        if latencies is None:
            # The first step that serves tells how long steps take.
            return 0 if step.is_served else unit.remaining
        if self._share_of(step) is not None:
            return self._account.tokens(step, unit, latencies)
        there = self._window(step, unit, latencies, step.left_s(self.burst))
        if self._keeps_gaps(step):
            return 0 if self._is_better_in_layers(step, unit, latencies, there) else there
        if there < 1:
            # Even the least window takes longer than a step may; alone, it runs all the same.
            is_alone = not step.is_served and not step.load.windows
            return min(unit.remaining, step.limits.least_chunk) if is_alone else 0
        most = self._window(step, unit, latencies, step.most_seconds(self.burst))
        enough = min(_efficiency(unit, latencies, most), _ENOUGH)
        of_most = _efficiency(unit, latencies, there) / enough
        if of_most < self._demand:
            self._demand *= _DECAY_GROWING if there > self._last else _DECAY
            self._last = there
            return 0
        self._demand, self._last = min(_DEMAND, _RISE * of_most), 0
        return there

    def _window(self, step: Step, unit: Forward, latencies: Latencies, seconds: float) -> int:
        """Return the tokens of a window that fits into `seconds`, in an even split of the rest."""
        load = step.load + Load(windows=1)
        seconds = latencies.forward.most_s(seconds, step.decoded, kind_of(load, step.decoded))
        fitting = latencies.forward.tokens_within(seconds, unit.context, load, is_trained=True)
        return _even_part(unit.remaining, min(fitting, self._back(step, unit, latencies)))

    def _longest(self, step: Step, unit: Forward, latencies: Latencies) -> int:
        """Return the tokens of a window that goes forward in as many steps as it takes."""
        return _even_part(unit.remaining, self._back(step, unit, latencies))

    def _back(self, step: Step, unit: Forward, latencies: Latencies) -> int:
        """Return the most tokens of a window one layer of whose backward fits into any step.

        They are not few: below `least_chunk` a layer takes hardly less time.
        """
        back_s = step.most_seconds() / 2
        room_s, tpot_slo_s = self._room_s, step.limits.tpot_slo_s
        if room_s is None and tpot_slo_s is not None:
            room_s = tpot_slo_s - latencies.forward.bound_s(Load(1, sampled=1))
        if room_s is not None:
            # Of a part u of the room R, all but b₀ / (u R) is its tokens' time, and half a part is
            # left over in a step: (1 - b₀ / (u R)) (1 - u / 2) is greatest for u² = 2 b₀ / R.
            part = math.sqrt(2 * latencies.backward.seconds(Load()) / max(room_s, 1e-9))
            back_s = min(back_s, min(_UNIT, max(_LEAST_UNIT, part)) * room_s)
        back = latencies.backward.tokens_within(back_s, unit.context, Load())
        return min(step.limits.tokens - step.load.tokens, max(back, step.limits.least_chunk))

    def in_layers(self, step: Step, unit: Forward, ahead_s: float) -> int:
        if step.latencies is None or not self._keeps_gaps(step):
            return 0
        there = self._window(step, unit, step.latencies, step.left_s())
        if not self._is_better_in_layers(step, unit, step.latencies, there):
            return 0
        tokens = self._longest(step, unit, step.latencies)
        load = Load.of(tokens, unit.context)
        return tokens if self.fits(step, Phase.FORWARD, load, ahead_s) else 0

    def _is_better_in_layers(
        self, step: Step, unit: Forward, latencies: Latencies, there: int
    ) -> bool:
        """Return True if a window of `there` tokens beside what is served takes longer a token.

        One in layers is longer, and reads the base's weights for itself.
        """
        if there < 1:
            return True
        tokens = self._longest(step, unit, latencies)
        load = Load.of(tokens, unit.context)
        layers_s = unit.layers * latencies.layer.seconds(load)
        whole_s = _seconds_of_window(unit, latencies, there)
        return whole_s / there > (layers_s + _backward_s(unit, latencies, load)) / tokens

    def fits(self, step: Step, phase: Phase, load: Load, ahead_s: float) -> bool:
        if step.latencies is None:
            return not step.is_served and not step.units
        latency = step.latencies.of(phase)
        if self._share_of(step) is not None:
            return self._account.affords(latency.seconds(load))
        left_s = step.left_s(self.burst) - ahead_s
        is_first = not step.is_served and left_s > 0
        return is_first or latency.bound_s(load) <= left_s

    def part(self, step: Step, part: Part, beside: Load, ahead_s: float) -> int:
        latencies = step.latencies
        if part.stage.phase is not Phase.LOSS or latencies is None:
            return super().part(step, part, beside, ahead_s)
        # As much of a loss as fits, unless so little does that its constant time is most of it.
        left, least = part.load.tokens, min(part.load.tokens, step.limits.least_chunk)
        if self._share_of(step) is not None:
            is_paid = self._account.affords(latencies.loss.seconds(Load(least)))
            return min(left, self._account.paid_tokens(latencies.loss)) if is_paid else 0
        left_s = step.left_s(self.burst) - ahead_s
        fitting = _within(latencies.loss, left_s)
        if not step.is_served and left_s > 0:
            return min(left, max(fitting, least))
        room_s = left_s if self._room_s is None else self._room_s
        wanted = max(_LEAST_LOSS, _within(latencies.loss, _UNIT * room_s))
        return min(left, fitting) if fitting >= min(left, wanted) else 0

    def ran(self, step: Step, seconds: float) -> None:
        if self._share_of(step) is not None:
            self._account.spend(seconds)


def _even_part(tokens: int, most: int) -> int:
    """Return the size of equal parts of at most `most` tokens."""
    return -(-tokens // -(-tokens // most)) if most > 0 else 0


def _within(latency: Latency, seconds: float) -> int:
    """Return the most tokens whose loss ends within a time."""
    nothing = Load()
    most_s = latency.most_s(seconds, nothing, kind_of(Load(1), nothing))
    return latency.tokens_within(most_s, 0, nothing)


def _seconds_of_window(unit: Forward, latencies: Latencies, tokens: int) -> float:
    """Return the seconds that a window takes beside what a step serves, forward and backward."""
    of_window = Load.of_window(tokens, unit.context)
    forward_s = latencies.forward.seconds(of_window) - latencies.forward.seconds(Load())
    return forward_s + _backward_s(unit, latencies, Load.of(tokens, unit.context))


def _backward_s(unit: Forward, latencies: Latencies, load: Load) -> float:
    return unit.layers * latencies.backward.seconds(load)


def _efficiency(unit: Forward, latencies: Latencies, tokens: int) -> float:
    """Return the share of a window's time, forward and backward, that its tokens take."""
    forward, backward, layers = latencies.forward, latencies.backward, unit.layers
    window, of_tokens = Load(windows=1), Load.of_window(tokens, unit.context)
    constant_s = forward.seconds(window) - forward.seconds(Load())
    constant_s += layers * backward.seconds(Load())
    tokens_s = forward.seconds(of_tokens) - forward.seconds(window)
    tokens_s += layers * (backward.seconds(of_tokens) - backward.seconds(Load()))
    return tokens_s / (constant_s + tokens_s) if tokens_s > 0 else 1.0


_UNIT = 0.5
"""The most that a backward unit takes of the time that steps leave: two fit, also into smaller."""
_LEAST_UNIT = 0.15
"""The least of it, however little of a unit's time is constant."""
_LEAST_LOSS = 4
"""The least tokens of a loss that run in a step, more than those of a block of the head's rows."""
_SMOOTHING = 0.05
"""The weight of the last step in the time that steps leave."""
_ENOUGH = 0.93
"""The efficiency above which no larger window is waited for: little is left to gain."""
_DEMAND = 0.99
"""The first demand, as a share of the efficiency of the largest window."""
_DECAY_GROWING, _DECAY = 0.995, 0.95
"""Decay of the demand after a step without a window, with more room than the last one or not."""
_RISE = 1.1
"""The next window must reach 1.1 times this one's efficiency."""

"""Co-serving: as much finetuning as fits beside requests (FlexLLM v2 §6.2)."""

from __future__ import annotations

import math

from pcg.errors import FinetuneError
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.sharing.rule import Sharing
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.engine.sharing.time_account import TimeAccount
from pcg.runtime.engine.sharing.time_left import TimeLeft
from pcg.runtime.engine.sharing.window_choice import WindowChoice
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
        self._left = TimeLeft()
        self._windows = WindowChoice(self._left)
        self._before: list[tuple[Step, float]] = []
        self._has_guess = False
        self._account = TimeAccount()

    @property
    def patience(self) -> int:
        waits = not self._account.has_share and (self.burst > 1 or self._left.has_idle)
        return super().patience if waits else _PATIENCE

    def _share_of(self, step: Step) -> float | None:
        """Return the share of the time that finetuning has; None where it has what is left."""
        is_free = step.is_served and step.tpot_slo_s is None
        return step.limits.finetuning_share if is_free else None

    def begin(self, step: Step) -> None:
        self._account.begin(step, self._share_of(step))
        if step.latencies is None:
            return
        self._note_time(step, step.latencies)
        self._windows.pass_step()
        if step.gap_s < math.inf:
            step.latencies.pass_step()

    def _note_time(self, step: Step, latencies: Latencies) -> None:
        """Note the time of the step before, once it is known, and the room that this one has."""
        slo_s = step.limits.tpot_slo_s
        if not self._has_guess and slo_s is not None:
            self._left.expect(slo_s - latencies.forward.bound_s(Load(1, sampled=1)), slo_s)
        self._has_guess = True
        for before, room_s in self._before:
            if not before.is_under_way:
                self._left.note(before, room_s)
        self._before = [one for one in self._before if one[0].is_under_way]
        self._before.append((step, step.left_s(self.burst) - step.ahead_s()))

    def _keeps_gaps(self, step: Step) -> bool:
        """Return True where time that a step leaves is lost: there is a promise for each gap."""
        return self.burst == 1 and step.is_served and step.tpot_slo_s is not None

    def forward(self, step: Step, unit: Forward) -> int:
        latencies = step.latencies
        if latencies is None:
            # The first step that serves tells how long steps take.
            return 0 if step.is_served else unit.remaining
        if self._share_of(step) is not None:
            return self._account.paid_whole(step, unit, latencies)
        if step.yields:
            return 0  # in layers, between which it can end
        there = self._window(step, unit, latencies, step.left_s(self.burst))
        if self._keeps_gaps(step):
            best = self._windows.best(step, unit, latencies)
            is_enough = there >= _LEAST_WINDOW * _even_part(unit.remaining, best.tokens)
            return there if is_enough and not best.in_layers else 0
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
        best = self._windows.best(step, unit, latencies).tokens
        return _even_part(unit.remaining, min(fitting, best))

    def in_layers(self, step: Step, unit: Forward, ahead_s: float) -> int:
        if step.latencies is None:
            return 0
        if self._share_of(step) is not None:
            is_whole = self._account.whole(step, unit, step.latencies) > 0
            return 0 if is_whole else self._account.window(step, unit, step.latencies)
        if step.yields:
            tokens = self._window(step, unit, step.latencies, step.most_seconds(self.burst))
            return max(tokens, min(unit.remaining, step.limits.least_chunk))
        if not self._keeps_gaps(step):
            return 0
        best = self._windows.best(step, unit, step.latencies)
        if not best.in_layers:
            return 0
        tokens = _even_part(unit.remaining, best.tokens)
        load = Load.of(tokens, unit.context)
        return tokens if self.fits(step, Phase.FORWARD, load, ahead_s) else 0

    def fits(self, step: Step, phase: Phase, load: Load, ahead_s: float) -> bool:
        if step.latencies is None:
            return not step.is_served and not step.units
        latency = step.latencies.of(phase)
        if self._share_of(step) is not None:
            seconds, least = latency.seconds(load), step.limits.least_chunk
            is_least = load.tokens <= least
            least_s = seconds if is_least else latency.seconds(Load.of(least, 0))
            return self._account.affords(seconds, least_s)
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
            least_s = latencies.loss.seconds(Load(least))
            is_paid = self._account.affords(least_s, least_s)
            return min(left, max(least, self._account.paid(latencies.loss))) if is_paid else 0
        left_s = step.left_s(self.burst) - ahead_s
        fitting = _within(latencies.loss, min(left_s, _PIECE_S) if step.yields else left_s)
        if not step.is_served and left_s > 0:
            return min(left, max(fitting, least))
        room_s = left_s if self._left.room_s is None else self._left.room_s
        wanted = max(_LEAST_LOSS, _within(latencies.loss, _LOSS * room_s))
        return min(left, fitting) if fitting >= min(left, wanted) else 0

    def ran(self, step: Step, seconds: float) -> None:
        if self._share_of(step) is not None:
            self._account.spend(seconds)

    def corrected(self, step: Step, seconds: float) -> None:
        if self._share_of(step) is not None:
            self._account.correct(seconds)


def _even_part(tokens: int, most: int) -> int:
    """Return the size of equal parts of at most `most` tokens."""
    return -(-tokens // -(-tokens // most)) if most > 0 else 0


def _within(latency: Latency, seconds: float) -> int:
    """Return the most tokens whose loss ends within a time."""
    nothing = Load()
    most_s = latency.most_s(seconds, nothing, kind_of(Load(1), nothing))
    return latency.tokens_within(most_s, 0, nothing)


def _efficiency(unit: Forward, latencies: Latencies, tokens: int) -> float:
    """Return the share of a window's time, forward and backward, that its tokens take."""
    forward, backward, layers = latencies.forward, latencies.backward, unit.layers
    window, of_tokens = Load(windows=1), Load.of_window(tokens, unit.context)
    constant_s = forward.seconds(window) - forward.seconds(Load())
    constant_s += layers * backward.seconds(Load())
    tokens_s = forward.seconds(of_tokens) - forward.seconds(window)
    tokens_s += layers * (backward.seconds(of_tokens) - backward.seconds(Load()))
    # A token before the knee is worth what one beyond it takes.
    cheap_s = sum(
        times * one.knee.token_s * min(tokens, one.knee.tokens)
        for times, one in ((1, forward), (layers, backward))
    )
    return (tokens_s + cheap_s) / (constant_s + tokens_s) if tokens_s > 0 else 1.0


_PATIENCE = 32
"""Steps without room for a part after which it begins again, where no idle time is expected."""
_LEAST_WINDOW = 0.5
"""The least tokens of a window beside requests, relative to those that would be best."""
_LOSS = 0.5
"""The least of a loss that runs, relative to what would fit into the time that steps leave."""
_PIECE_S = 0.025
"""The time of a piece of a loss between two of which a request may end a step."""
_LEAST_LOSS = 4
"""The least tokens of a loss that run in a step, more than those of a block of the head's rows."""
_ENOUGH = 0.93
"""The efficiency above which no larger window is waited for: little is left to gain."""
_DEMAND = 0.99
"""The first demand, as a share of the efficiency of the largest window."""
_DECAY_GROWING, _DECAY = 0.995, 0.95
"""Decay of the demand after a step without a window, with more room than the last one or not."""
_RISE = 1.1
"""The next window must reach 1.1 times this one's efficiency."""

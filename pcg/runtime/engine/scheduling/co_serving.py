"""Co-serving: as much finetuning as the SLOs of requests allow (FlexLLM v2 §6.2).

Each step has a room R for finetuning, and a part or window of t seconds runs if t ≤ R:

    requests with an SLO        R = (1 - reserve) · gap - f(c)       f(c): the time of the requests
    requests without            R = 0.25 f(c), or f(c) · floor / (1 - floor) if that is more; the
                                latter on average
    no request                  R = idle_step_s

The forward of a window of s tokens runs whole, in the batch of the requests, or in L parts of a
layer; the backward runs in L parts. For the recent steps, with rooms R_i and idle time I,

    pieces of t seconds that would have run      n(t) = Σ ⌊R_i / t⌋ + I(t) / t
    windows                                      1 / (L_f / n(t_f) + L / n(t_b))

and s · windows tokens are trained. The chosen s maximizes this number, among lengths up to twice
the longest window so far, as the time of longer windows is unknown. Unused time of a step shortens
the step and becomes idle time. If requests arrive at random and run immediately, P = exp(-load) of
the time is idle, and of each second by which steps become shorter, φ = -ln(P) P / (1 - P) becomes
idle: I(t) = I + φ (used - Σ ⌊R_i / t⌋ t).

A job that found no room in `patience` steps runs its smallest piece regardless of the room, with
patience = 2 / (1 - tpot_percentile) steps: these pieces cause half of the gaps that may exceed the
SLO.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from pcg.runtime.admission.latency import Latencies
from pcg.runtime.engine.scheduling.work import Refusal, Sharing, Work
from pcg.runtime.requests.step import Load
from pcg.runtime.training.work_units import Forward, Part, Phase


class CoServing(Sharing):
    """Fits as much finetuning into each step as the SLOs allow: s = argmax f(c, s) ≤ SLO."""

    def __init__(self) -> None:
        self._recent = RecentRooms()
        self._best: Window | None = None
        self._decoded = Load(1, sampled=1)
        self._steps = self._longest = 0
        self._credit_s = math.inf
        self._wanted_s = self._carried_s = 0.0
        self._before: list[tuple[Work, float]] = []

    def _share(self, work: Work) -> float | None:
        """Return the share of time for finetuning; None for all remaining time."""
        limits = work.limits
        if work.is_served and not work.is_promised:
            return limits.finetuning_floor
        return 1 - limits.serving_share if work.is_served and limits.serving_share else None

    def begin(self, work: Work) -> None:
        if work.latencies is None:
            return
        self._close(work.latencies)
        if work.decoded.tokens:
            self._decoded = work.decoded
        share, self._carried_s = self._share(work), 0.0
        if share is None:
            self._credit_s = math.inf
        else:
            # Limit the credit to the time of an idle step, or of the piece that waits for it.
            most_s = max(work.limits.idle_step_s, self._wanted_s)
            earned_s = share / (1 - share) * work.served_s()
            before_s = 0.0 if self._credit_s == math.inf else self._credit_s
            self._credit_s = min(before_s + earned_s, most_s)
            # A piece that was too long for the last step may also use that step's unused time.
            self._carried_s = max(0.0, min(self._credit_s - earned_s, self._wanted_s))
        self._wanted_s = 0.0
        room_s = max(0.0, self._room_s(work))
        self._before.append((work, room_s))
        self._recent.next_s = room_s
        self._steps += 1
        if self._steps % (_ROOMS // 4) == 0:
            self._best = None

    def _close(self, latencies: Latencies) -> None:
        """Learn from completed steps."""
        for work, room_s in self._before:
            if work.is_under_way:
                continue
            self._recent.add(work, room_s)
            if work.is_promised:
                is_filled = work.trained_s > 0 or work.served.tokens > work.decoded.tokens
                is_missed = work.lasted_s > work.gap_s and is_filled and not work.has_exception
                latencies.reserve.observe(is_missed, work.limits.tpot_percentile)
        self._before = [pair for pair in self._before if pair[0].is_under_way]

    def _room_s(self, work: Work) -> float:
        """Return the time for finetuning in the step, seconds."""
        assert work.latencies is not None
        if not work.is_served:
            return work.limits.idle_step_s
        if work.is_promised:
            return work.latencies.reserve.within(work.gap_s) - work.served_s()
        share = self._share(work) or 0.0
        return max(_STRETCH, share / (1 - share)) * work.served_s()

    def _left_s(self, work: Work, ahead_s: float) -> float:
        """Return the remaining room before other work of `ahead_s` seconds."""
        room_s = self._room_s(work) + self._carried_s
        return room_s + work.served_s() - ahead_s - work.elapsed_s

    def _affords(self, work: Work, piece: Refusal, *, is_due: bool, is_alone: bool = True) -> bool:
        self._wanted_s = max(self._wanted_s, piece.takes_s)
        # Without an SLO, the first piece of a step runs once its time is earned.
        may_exceed = is_alone and work.units == 0 and (is_due or not work.is_promised)
        if piece.takes_s <= self._credit_s and (piece.takes_s <= piece.left_s or may_exceed):
            work.has_exception |= piece.takes_s > piece.left_s
            return True
        work.refusal = piece._replace(left_s=min(piece.left_s, self._credit_s))
        return False

    def forward(self, work: Work, unit: Forward) -> int:
        latencies = work.latencies
        if latencies is None:
            # The first serving step is measured without finetuning.
            return 0 if work.is_served else unit.remaining
        if work.yields:
            return 0  # run in layers, as the step may end between two layers
        best = self._window(work, unit, latencies)
        if best.in_layers and work.is_served:
            return 0
        beside = work.load + Load(windows=1)
        left_s = self._left_s(work, 0.0)
        fitting = latencies.forward.tokens_within(left_s, unit.context, beside, is_trained=True)
        grain = _grain(work)
        wanted = _even_part(unit.remaining, best.tokens, grain)
        tokens = _even_part(unit.remaining, min(fitting, best.tokens), grain)
        if work.is_served and 2 * tokens < wanted:
            tokens = wanted  # too long for the room: `_affords` refuses it
        tokens = max(tokens, min(unit.remaining, grain))
        load = work.load + unit.load(tokens)
        seconds = latencies.forward.seconds(load) - work.ahead_s()
        piece = Refusal(tokens, None, seconds, left_s - work.ahead_s())
        if not self._affords(work, piece, is_due=False):
            return 0
        self._credit_s -= seconds
        return tokens

    def in_layers(self, work: Work, unit: Forward, ahead_s: float, *, is_due: bool) -> int:
        if work.latencies is None:
            return 0
        best = self._window(work, unit, work.latencies)
        if not (best.in_layers or work.yields or is_due):
            return 0
        grain = _grain(work)
        most = grain if is_due else max(best.tokens, grain)
        tokens = _even_part(unit.remaining, most, grain)
        load = unit.whole.window_load(tokens)
        return tokens if self.fits(work, Phase.FORWARD, load, ahead_s, is_due=is_due) else 0

    def fits(
        self, work: Work, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        if work.latencies is None:
            return not work.is_served and not work.units
        seconds = work.latencies.of(phase).seconds(load)
        piece = Refusal(load.tokens, phase, seconds, self._left_s(work, ahead_s))
        return self._affords(work, piece, is_due=is_due)

    def part(self, work: Work, part: Part, beside: Load, ahead_s: float, *, is_due: bool) -> int:
        latencies = work.latencies
        phase, tokens = part.stage.phase, part.load.tokens
        if latencies is None:
            return tokens if self.fits(work, phase, part.load, ahead_s) else 0
        if phase is not Phase.LOSS:
            seconds = latencies.of(phase).seconds(beside + part.load)
            piece = Refusal(tokens, phase, seconds, self._left_s(work, ahead_s))
            fits = self._affords(work, piece, is_due=is_due, is_alone=not beside.tokens)
            return tokens if fits else 0
        # As much of a loss as fits; its constant time makes a few tokens expensive. In a step that
        # may yield to a request, a loss takes no longer than a layer.
        most_s = min(self._left_s(work, ahead_s), self._credit_s)
        if work.yields:
            most_s = min(most_s, latencies.backward.seconds(part.load))
        grain, loss = _grain(work), latencies.loss
        fitting = _repeated(loss.tokens_within(most_s, 0, Load()), grain)
        is_worthwhile = loss.seconds(Load(fitting)) >= 2 * loss.seconds(Load())
        least = min(tokens, grain)
        if fitting >= least or (fitting and is_worthwhile):
            return min(tokens, fitting)
        fits = self.fits(work, Phase.LOSS, Load(least), ahead_s, is_due=is_due)
        return least if fits else 0

    def ran(self, work: Work, seconds: float) -> None:
        self._credit_s -= seconds

    def _window(self, work: Work, unit: Forward, latencies: Latencies) -> Window:
        """Return the window length that trains the most tokens."""
        if self._best is None or self._longest < latencies.longest:
            self._best = self._choose(work, unit, latencies)
        room = work.limits.tokens - work.load.tokens
        return self._best._replace(tokens=min(self._best.tokens, room))

    def _choose(self, work: Work, unit: Forward, latencies: Latencies) -> Window:
        recent, decoded, forward = self._recent, self._decoded, latencies.forward
        tokens = grain = _grain(work)
        best, most = Window(grain, True), 0.0
        decoded_s = forward.seconds(decoded)
        longer = 1 / latencies.reserve.within(1.0)  # times of parts vary like times of steps
        # The time of windows beyond twice the longest so far is unknown.
        self._longest = latencies.longest
        while tokens <= min(max(2 * self._longest, grain), work.limits.tokens):
            load = Load.of_rows(tokens, unit.whole.row)
            window = load + Load(trained=tokens, windows=1)
            layer_s, back_s = latencies.layer.seconds(load), latencies.backward.seconds(load)
            if not latencies.backward.known:
                back_s = max(back_s, 2 * layer_s)
            if most and max(layer_s, back_s) > _PIECE * work.limits.idle_step_s:
                break
            backward = recent.pieces(longer * back_s) / max(unit.layers, 1)
            beside_s = forward.seconds(decoded + window) - decoded_s
            whole = recent.pieces(longer * beside_s, longer * forward.seconds(window))
            in_layers = recent.pieces(longer * layer_s) / max(unit.layers, 1)
            for windows, is_cut in ((whole, False), (in_layers, True)):
                if windows > 0 and backward > 0:
                    trained = tokens / (1 / windows + 1 / backward)
                    if trained > most:
                        best, most = Window(tokens, is_cut), trained
            tokens = max(tokens + grain, _repeated(int(_RATIO * tokens), grain))
        return best


class Window(NamedTuple):
    """The tokens of windows, and True if their forward runs in parts of a layer."""

    tokens: int
    in_layers: bool


class _Served(NamedTuple):
    """A serving step: its room, its time, finetuning's time, and the idle time before the step."""

    room_s: float
    spent_s: float
    used_s: float
    idle_s: float


class RecentRooms:
    """The rooms of recent steps, and the idle time between them."""

    def __init__(self) -> None:
        self.next_s = 0.0  # the room of the planned step, used before the first step ends
        self._steps: deque[_Served] = deque(maxlen=_ROOMS)
        self._idle_s = 0.0

    def add(self, work: Work, room_s: float) -> None:
        """Add a completed step and its room."""
        if not work.is_served:
            self._idle_s += work.spent_s
            return
        if not work.spent_s:  # the step failed
            return
        self._steps.append(_Served(room_s, work.spent_s, work.trained_s, self._idle_s))
        self._idle_s = 0.0

    def pieces(self, served_s: float, idle_s: float | None = None) -> float:
        """Return how many pieces would have run, by a piece's times in serving and idle steps."""
        idle = self._idle_s + sum(step.idle_s for step in self._steps)
        if not self._steps and not idle:
            return int(self.next_s / served_s)
        served = sum(int(step.room_s / served_s) for step in self._steps)
        spent_s = sum(step.spent_s for step in self._steps)
        share = idle / (idle + spent_s)
        back = -math.log(share) * share / (1 - share) if 0 < share < 1 else share
        shorter_s = sum(step.used_s for step in self._steps) - served * served_s
        left_s = max(0.0, idle + back * shorter_s)
        return served + left_s / (served_s if idle_s is None else idle_s)


def _grain(work: Work) -> int:
    """Return the smallest window in tokens; longer windows are multiples of it."""
    return min(work.limits.least_chunk, work.limits.tokens)


def _repeated(tokens: int, grain: int) -> int:
    """Round down to a multiple of `grain` or, below `grain`, to a power of 2."""
    return tokens - tokens % grain if tokens >= grain else 1 << tokens.bit_length() >> 1


def _even_part(tokens: int, most: int, grain: int) -> int:
    """Return the size of about equal parts of at most `most` tokens, a multiple of `grain`.

    Sizes then repeat; libraries need some milliseconds to prepare products of a new size.
    """
    most = _repeated(most, grain)
    if most < grain:
        return 0
    even = -(-tokens // -(-tokens // most))
    return min(tokens, -(-even // grain) * grain)


_STRETCH = 0.25
"""The time of parts in a step without SLOs, relative to the time of its requests."""
_PIECE = 0.5
"""The longest part without requests, relative to `idle_step_s`: a new request waits for it."""
_ROOMS = 64
"""Number of recent serving steps; the window length is chosen every `_ROOMS // 4` steps."""
_RATIO = 1.25
"""The ratio of consecutive candidate window lengths."""

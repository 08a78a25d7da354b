"""The time that finetuning has lately: steps that serve nothing, and the rooms of those that do.

Over the latest seconds, I that nothing was served, and S of n steps that served, with rooms R_i of
which finetuning used X. Pieces of t seconds then run

    in steps that serve    k(t) = n · mean ⌊R_i / t⌋
    and in idle time       (I + φ (X - k(t) t)) / t

What steps that serve do not use shortens them, so that requests end sooner. Where they come at
random and run at once, idle is the share of the time P = I / (I + S) = exp(-load), and of a second
that steps are shorter

    φ = -ln(P) P / (1 - P)

become idle: nearly all while little is served, and none where requests always run.
"""

from __future__ import annotations

import math
from collections import deque

from pcg.runtime.engine.sharing.step import Step


class TimeLeft:
    """The time that was left to finetuning, of which later steps are expected to have as much."""

    def __init__(self) -> None:
        self._idle_s = _FIRST_IDLE_S
        self._served_s = self._used_s = self._steps = 0.0
        self._rooms: deque[float] = deque(maxlen=_KEPT)
        self._since_idle = 0

    @property
    def room_s(self) -> float | None:
        """The mean room of steps that serve, seconds; None while nothing is known of any."""
        return sum(self._rooms) / len(self._rooms) if self._rooms else None

    @property
    def has_idle(self) -> bool:
        """True if idle time is expected; False once many steps in a row served."""
        return self._since_idle < _NOT_IDLE

    def expect(self, room_s: float, step_s: float) -> None:
        """Begin with a guess of steps that serve, and the room that each has."""
        self._served_s, self._steps = _FIRST_SERVED_S, _FIRST_SERVED_S / step_s
        self._rooms.append(room_s)

    def note(self, step: Step, room_s: float) -> None:
        """Note a step that is over, and the room that it had; steps without a promise have none."""
        if step.is_served and step.gap_s == math.inf:
            return
        kept = math.exp(-step.spent_s / _REMEMBERED_S)
        self._idle_s, self._served_s = kept * self._idle_s, kept * self._served_s
        self._used_s, self._steps = kept * self._used_s, kept * self._steps
        if not step.is_served:
            self._idle_s += step.spent_s
            self._since_idle = 0 if step.spent_s else self._since_idle
            return
        self._served_s += step.spent_s
        self._used_s += step.trained_s
        self._steps += 1
        self._since_idle += 1
        if self._since_idle % _EVERY == 0 or len(self._rooms) < _KEPT:
            self._rooms.append(max(0.0, room_s))

    def pieces(self, seconds: float, bound_s: float) -> float:
        """Return how many pieces of work run in steps that serve.

        Args:
            seconds: the time of each.
            bound_s: the time that has to be left for one to begin.
        """
        last_s = bound_s - seconds
        fitting = sum(int((_SURE * room_s - last_s) / seconds) for room_s in self._rooms)
        return self._steps * max(fitting, 0) / max(len(self._rooms), 1)

    def steps_with(self, bound_s: float) -> float:
        """Return how many steps that serve have so much room."""
        fitting = sum(room_s >= bound_s for room_s in self._rooms)
        return self._steps * fitting / max(len(self._rooms), 1)

    def idle_s(self, used_s: float) -> float:
        """Return the idle time where steps that serve have so much finetuning in them."""
        if not self.has_idle:
            return 0.0
        share = self._idle_s / (self._idle_s + self._served_s)
        back = -math.log(share) * share / (1 - share) if share < 1 else 1.0
        return max(0.0, self._idle_s + back * (self._used_s - used_s))


_KEPT = 64
"""The most rooms."""
_SURE = 0.75
"""The part of a room that is counted on, as a piece that hardly fits now may soon fit no more."""
_EVERY = 4
"""One of so many steps that serve is remembered by its room."""
_REMEMBERED_S = 20.0
"""After so many seconds of steps a second counts by 1 / e."""
_NOT_IDLE = 256
"""Where so many steps in a row served, no idle time is expected."""
_FIRST_IDLE_S, _FIRST_SERVED_S = 0.5, 2.0
"""What is supposed before any step, where there is an SLO."""

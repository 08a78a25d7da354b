"""Clocks: the machine's time, or simulated time."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pcg.ranks.group import SINGLE_RANK, Ranks, broadcast_from_first


class Clock(Protocol):
    """Tells the time."""

    def now_s(self, first_ns: int | None = None) -> float:
        """Return the seconds since the clock's start.

        `first_ns` is the first rank's `time.monotonic_ns`, if a step's tokens brought it.
        """

    def latest_s(self) -> float:
        """Return them as far as they are known here; over ranks, by their latest message."""

    def here_s(self) -> float:
        """Return them on any thread, without a message; over ranks, on the first one alone."""


class MachineClock:
    """The machine's time since the clock was made.

    Over ranks it is the first rank's on all of them, so that all decide alike what to run. `now_s`
    is a message then, for which all must ask at the same places. A step's tokens bring the time
    with them, so that steps that follow each other need no other message for it; after a pause
    between two steps, the second is planned by the time at which the first ended.
    """

    def __init__(self, ranks: Ranks = SINGLE_RANK) -> None:
        self._ranks = ranks
        self._start_ns = self._asked_ns()
        self._latest_s = 0.0

    def now_s(self, first_ns: int | None = None) -> float:
        first_ns = self._asked_ns() if first_ns is None else first_ns
        self._latest_s = (first_ns - self._start_ns) / 1e9
        return self._latest_s

    def latest_s(self) -> float:
        return self.here_s() if self._ranks.size == 1 else self._latest_s

    def here_s(self) -> float:
        return (time.monotonic_ns() - self._start_ns) / 1e9

    def _asked_ns(self) -> int:
        now_ns = time.monotonic_ns()
        if self._ranks.size == 1:
            return now_ns
        return int(broadcast_from_first(self._ranks, torch.tensor([now_ns])))


class SimulatedClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self._now = 0.0

    def now_s(self, first_ns: int | None = None) -> float:
        return self._now

    def latest_s(self) -> float:
        return self._now

    def here_s(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wait_until(self, time_s: float) -> None:
        """Advance to a time, unless it has passed."""
        self._now = max(self._now, time_s)

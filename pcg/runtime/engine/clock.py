"""Clocks: the machine's time, or simulated time."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pcg.parallel.ranks.group import SINGLE_RANK, Ranks, broadcast_from_first


class Clock(Protocol):
    """Tells the time."""

    def now_s(self) -> float:
        """Return the seconds since the clock's start."""


class MachineClock:
    """The machine's time since the clock was made.

    Over ranks it is the first rank's on all of them, so that all decide alike what to run; each
    must ask for the time at the same places.
    """

    def __init__(self, ranks: Ranks = SINGLE_RANK) -> None:
        self._ranks = ranks
        self._start = time.monotonic()

    def now_s(self) -> float:
        now_s = time.monotonic() - self._start
        if self._ranks.size == 1:
            return now_s
        return float(broadcast_from_first(self._ranks, torch.tensor([now_s], dtype=torch.float64)))


class SimulatedClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self._now = 0.0

    def now_s(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wait_until(self, time_s: float) -> None:
        """Advance to a time, unless it has passed."""
        self._now = max(self._now, time_s)

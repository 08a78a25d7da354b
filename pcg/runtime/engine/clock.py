"""Time: the machine's, or a simulated one."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pcg.parallel.ranks.group import ALONE, Ranks, broadcast_from_first


class Clock(Protocol):
    """What tells the time."""

    def now_s(self) -> float:
        """Seconds from some beginning."""


class MachineClock:
    """The machine's own, from when it was made.

    Over ranks it is the first one's on all of them, so that all decide alike what to run: each
    asks for the time at the same places.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._start = time.monotonic()

    def now_s(self) -> float:
        """Seconds since it was made."""
        now_s = time.monotonic() - self._start
        if self._ranks.size == 1:
            return now_s
        return float(broadcast_from_first(self._ranks, torch.tensor([now_s], dtype=torch.float64)))


class SimulatedClock:
    """Stands until it is set forward."""

    def __init__(self) -> None:
        self._now = 0.0

    def now_s(self) -> float:
        """Seconds that it was set forward by."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Set it forward."""
        self._now += seconds

    def wait_until(self, time_s: float) -> None:
        """Set it forward to a time, if that is still to come."""
        self._now = max(self._now, time_s)

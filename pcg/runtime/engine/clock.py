"""Time: the machine's, or a simulated one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What tells the time."""

    def now_s(self) -> float:
        """Seconds from some beginning."""


class MachineClock:
    """The machine's own, from when it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start


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

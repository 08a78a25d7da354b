"""Clocks: the machine's time, or simulated time."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pcg.ranks.group import SINGLE_RANK, Ranks, broadcast_from_first


class Clock(Protocol):
    """A source of the current time."""

    def now_s(self, first_ns: int | None = None) -> float:
        """Return the seconds since the clock's start.

        `first_ns` is rank 0's `time.monotonic_ns`, if a step's tokens carried it.
        """

    def latest_s(self) -> float:
        """Return the seconds; over ranks, the time in the latest message."""

    def here_s(self) -> float:
        """Return the seconds on any thread, without a message; over ranks, on rank 0 only."""


class MachineClock:
    """The machine's time since the clock was created.

    Over ranks, the clock has rank 0's time, so that all ranks plan the same steps. `now_s` is then
    a collective call. The tokens of a step carry the time, so that consecutive steps need no
    further message; a step after a pause is planned by the time at which the previous step ended.
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
    """A clock that only `advance` and `wait_until` move."""

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

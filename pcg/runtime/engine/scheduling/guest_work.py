"""Guests' work: work other than requests and jobs, in the time that the engine's steps leave.

Guests' work consists of independent rows, such as the pieces of a base executor. It can be cut when
a step's time is used up, and continues in the next step:

    a step that serves with a TPOT SLO         SLO - elapsed time - bound of the requests' time
    a step that serves without an SLO          earned: share / (1 - share) of the serving time
    a step that serves nothing, or no step     all, in slices between which a request may start

Requests have priority. Waiting guests' work has at least LEAST_SHARE of the time regardless of
SLOs, so that it ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pcg.runtime.engine.scheduling.work import Work


@dataclass(eq=False)
class RowWork:
    """Work on independent rows.

    Attributes:
        kind: key for predicting the time per row.
        rows: the number of rows.
        act: processes rows `start` to `stop - 1`, synchronously.
        done: future that is done when all rows are processed.
    """

    kind: Hashable
    rows: int
    act: Callable[[int, int], None]
    done: Future[None] = field(default_factory=Future)
    ended: int = 0


class RowTimes:
    """Observed times of work by kind and number of rows, rounded up to powers of two.

    The expected time grows with the rows, at most in proportion.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, dict[int, float]] = {}

    def observe(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Learn from work that ran."""
        if kind not in self._seconds and len(self._seconds) >= _MOST_KINDS:
            self._seconds.pop(next(iter(self._seconds)))  # the oldest kind
        known, size = self._seconds.setdefault(kind, {}), _size(rows)
        # Slower times apply immediately, faster times gradually.
        before = known.get(size, 0.0)
        known[size] = max(seconds, before + _FORGOTTEN * (seconds - before))

    def bound_s(self, kind: Hashable, rows: int) -> float | None:
        """Return an upper bound on the time of `rows` rows; None for an unknown kind."""
        known, size = self._seconds.get(kind), _size(rows)
        if not known:
            return None
        smaller = [size_known for size_known in known if size_known <= size]
        if not smaller:
            return _MARGIN * known[min(known)]
        nearest = max(smaller)
        return _MARGIN * known[nearest] * size / nearest

    def within(self, kind: Hashable, rows: int, seconds: float) -> int:
        """Return how many of `rows` rows end within a time; LEAST_ROWS for an unknown kind."""
        if seconds <= 0:
            return 0
        tried = rows
        while tried:
            bound_s = self.bound_s(kind, tried)
            if bound_s is None:
                return min(rows, LEAST_ROWS)
            if bound_s <= seconds:
                return tried
            tried = 0 if tried <= LEAST_ROWS else _size(tried) // 2
        return 0


class GuestWork:
    """The queue of guests' work and its time; the engine's thread runs it.

    Args:
        call: calls a function on the engine's thread between two steps.
        is_idle: returns True if the engine is idle.
        is_awaited: returns True if a caller waits for the engine.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], None]], Future[Any]],
        is_idle: Callable[[], bool],
        is_awaited: Callable[[], bool],
    ) -> None:
        self.times = RowTimes()
        self._call = call
        self._is_idle = is_idle
        self._is_awaited = is_awaited
        self._works: deque[RowWork] = deque()
        self._is_called = False
        self._before: Work | None = None
        self._served_s = 0.0
        self._earned_s = 0.0
        self._owed_s = 0.0

    def submit(self, work: RowWork) -> Future[None]:
        """Queue work, on any thread; its future fails with the error of `act`."""
        self._works.append(work)
        self.wake()
        return work.done

    def wake(self) -> Future[Any]:
        """Make the engine's thread look for work; the future fails once the thread has ended."""
        return self._call(self._while_idle)

    def run(self, work: Work, ahead_s: float) -> None:
        """Run as much work as a step has time for, before its forward.

        Args:
            ahead_s: predicted time of the forward, seconds; 0 if unknown.
        """
        self._account(work)
        ahead_s = max(ahead_s, self._served_s) if work.is_served else 0.0
        while self._works and not work.is_over:
            rows = self._rows(self._left_s(work, ahead_s), is_awaited=work.is_served)
            if not rows:
                break
            took_s = self._slice(rows)
            work.elapsed_s += took_s
            work.units += 1
            self._earned_s -= took_s
            self._owed_s = max(0.0, self._owed_s - took_s)
        if self._works and not self._is_called:
            self._is_called = True
            self.wake()

    def _account(self, work: Work) -> None:
        """Earn time by the previous step's serving time."""
        before, self._before = self._before, work
        if before is None or not before.is_served or not before.spent_s:
            return
        self._served_s = before.spent_s
        self._owed_s += LEAST_SHARE / (1 - LEAST_SHARE) * before.spent_s if self._works else 0.0
        share = work.limits.finetuning_floor
        earned_s = self._earned_s + share / (1 - share) * before.spent_s
        self._earned_s = min(earned_s, work.limits.idle_step_s)

    def _left_s(self, work: Work, ahead_s: float) -> float:
        if not work.is_served:
            return _SLICE_S
        limits = work.limits
        left_s = min(work.gap_s, limits.idle_step_s) - work.elapsed_s - ahead_s
        if not work.is_promised:
            left_s = min(left_s, self._earned_s)
        return max(left_s, self._owed_s)

    def _while_idle(self) -> None:
        """Run work while there are no steps; steps run it themselves."""
        self._is_called = False
        while self._works and self._is_idle():
            self._slice(self._rows(_SLICE_S, is_awaited=False))
            if self._is_awaited():
                break
        if self._works and self._is_idle():
            self._is_called = True
            self.wake()

    def _rows(self, seconds: float, is_awaited: bool) -> int:
        """Return the rows of the first work to run now; some rows always if no request waits."""
        work = self._works[0]
        left = work.rows - work.ended
        fitting = self.times.within(work.kind, left, seconds)
        return fitting or (0 if is_awaited else min(left, LEAST_ROWS))

    def _slice(self, rows: int) -> float:
        """Run rows of the first work; return the seconds taken."""
        work, began_s = self._works[0], time.perf_counter()
        begin = work.ended
        try:
            work.act(begin, begin + rows)
        except Exception as error:  # fails the guest, not the engine
            self._works.popleft()
            work.done.set_exception(error)
            return time.perf_counter() - began_s
        took_s = time.perf_counter() - began_s
        work.ended = begin + rows
        self.times.observe(work.kind, rows, took_s)
        if work.ended == work.rows:
            self._works.popleft()
            work.done.set_result(None)
        return took_s


def _size(rows: int) -> int:
    """Round up to a power of two."""
    return 1 << (rows - 1).bit_length()


LEAST_SHARE = 0.05
"""The minimum share of time for waiting work, even if an SLO is missed."""
LEAST_ROWS = 16
"""The smallest slice, in rows: so many rows take hardly longer than a single row."""
_MOST_KINDS = 4096
"""Limit of kinds with known times, as guests choose some kinds."""
_SLICE_S = 0.025
"""The time of a slice in an idle engine, seconds: an arriving request waits at most so long."""
_MARGIN = 1.25
"""The bound on a slice's time, relative to the longest recent time."""
_FORGOTTEN = 0.1
"""The weight of a faster time against slower earlier times."""

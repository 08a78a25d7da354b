"""Reports of an engine's numbers to a server that watches them.

A thread that read the numbers 20 times a second would compete with the engine's thread for the
interpreter lock. So the engine's thread itself reports changes, with the chunks of the same step,
and only while the server watches:

    state    running and waiting requests, and adapters: immediately
    pages    with the next chunks: every step takes pages, and the server should wake only once
    totals   at most 0.5 s old, and exact when the engine is idle

The server watches while it reads the numbers often. A read then returns the latest report and
extends the time for which the engine reports; the numbers expire at that time. For rare reads, such
as a metrics database every 15 s, the server calls the engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.commands import Command, Jobs, Numbers
from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.requests.stream import Wakes
from pcg.serve.engine.messages import (
    Report,
    Watch,
    encode,
    plain,
    plain_state,
    totals_of,
    with_totals,
)

_COUNTED_S = 0.5
"""Time between two reports of totals while requests run or wait."""
_SETTLING_S = 0.02
"""Time between two reports of totals while only jobs run."""
_PAGES = "free_pages"


class Reports:
    """Reports changed numbers, on the engine's thread.

    Args:
        send: sends a report: now if it is given wakes, or with the next messages if given None.
    """

    def __init__(self, engine: AsyncEngine, send: Callable[[Report, Wakes | None], None]) -> None:
        self._engine = engine
        self._send = send
        self._until_s = -math.inf
        self._begins = False
        self._awaits_chunks = False
        self._forget()
        engine.watcher = self._report

    def watch(self, watch: Watch) -> None:
        """Extend the reports to the time in the message, from any thread."""
        self._until_s = watch.until_s
        if watch.begins:
            self._begins = True
            self._engine.call(_nothing)  # wakes a sleeping engine, which then reports

    def _forget(self) -> None:
        """Make the next report complete."""
        self._state: Mapping[str, Any] | None = None
        self._resident: Mapping[str, int] | None = None
        self._waiting: Mapping[str, int] | None = None
        self._totals: Mapping[str, Any] | None = None
        self._jobs: list[JobStatus] | None = None
        self._counted_s = -math.inf

    def _report(self, wakes: Wakes) -> None:
        """Report the changes since the last report."""
        if self._begins:
            self._begins = False
            self._forget()
        now_s = time.monotonic()  # read after `_begins`, so it is later than the watch's start
        if now_s >= self._until_s:
            return
        numbers = self._engine.numbers()
        report, adapters = Report(now_s), numbers.totals.adapters
        if adapters.resident != self._resident:
            report.resident = self._resident = adapters.resident.copy()
        if adapters.waiting != self._waiting:
            report.waiting = self._waiting = adapters.waiting.copy()
        if self._counts_are_due(numbers, now_s):
            self._count(numbers, now_s, report)
        is_idle = self._engine.engine.is_idle
        is_urgent, state = is_idle or report != Report(now_s), plain_state(numbers)
        if state != self._state:
            known = self._state or {}
            is_urgent = is_urgent or {**state, _PAGES: 0} != {**known, _PAGES: 0}
            report.state = self._state = state
        if report != Report(now_s) or (is_idle and self._awaits_chunks):
            self._awaits_chunks = not is_urgent
            self._send(report, wakes if is_urgent else None)

    def _counts_are_due(self, numbers: EngineNumbers, now_s: float) -> bool:
        if self._engine.engine.is_idle:
            return True
        is_served = numbers.running or numbers.queued
        return now_s - self._counted_s >= (_COUNTED_S if is_served else _SETTLING_S)

    def _count(self, numbers: EngineNumbers, now_s: float, report: Report) -> None:
        self._counted_s = now_s
        totals, jobs = plain(numbers.totals), self._engine.jobs()
        if totals != self._totals:
            report.totals = self._totals = totals
        if jobs != self._jobs:
            report.jobs = self._jobs = jobs


def _nothing() -> None:
    """Do nothing, on the engine's thread."""


# -------------------------------------------------------------------------------- watched numbers


_OFTEN_S = 1.0
"""Longest time between two reads for which the server watches."""
_WATCHED_S = 4.0
"""Time for which the engine reports after a read."""


class WatchedNumbers:
    """The latest numbers, for use on an event loop.

    Args:
        post: sends a message to the engine.
        now_s: the monotonic clock that both processes share, seconds.
    """

    def __init__(
        self, post: Callable[[bytes], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._post = post
        self._now_s = now_s
        self._began_s = self._until_s = self._asked_s = -math.inf
        self._forget()

    def _forget(self) -> None:
        self._state: Mapping[str, Any] | None = None
        self._totals: Totals | None = None
        self._jobs: list[JobStatus] | None = None

    def reply(self, command: Command[Any]) -> Any:
        """Return the reply to a command; None if the engine must be called."""
        if isinstance(command, Numbers):
            return self.numbers()
        return self.jobs() if isinstance(command, Jobs) else None

    def numbers(self) -> EngineNumbers | None:
        """Return the present numbers; None if the engine must be called."""
        now_s, asked_s = self._now_s(), self._asked_s
        self._asked_s = now_s
        if now_s >= self._until_s:
            self._forget()
            if now_s - asked_s < _OFTEN_S:
                self._began_s = now_s
                self._watch(now_s, begins=True)
        elif now_s >= self._until_s - _WATCHED_S / 2:
            self._watch(now_s, begins=False)
        if self._state is None or self._totals is None:
            return None
        return with_totals(self._state, self._totals)

    def jobs(self) -> list[JobStatus] | None:
        """Return the jobs at the time of the totals; None if the engine must be called."""
        return self._jobs if self._now_s() < self._until_s else None

    def _watch(self, now_s: float, *, begins: bool) -> None:
        self._until_s = now_s + _WATCHED_S
        self._post(encode(Watch(self._until_s, begins)))

    def take(self, report: Report) -> None:
        """Store a report; drop a report from before the present watch began."""
        if report.time_s < self._began_s:
            return
        if report.totals is not None:
            self._totals = totals_of(report.totals)
        if self._totals is not None:
            adapters = self._totals.adapters
            if report.resident is not None:
                adapters.resident = Counter(report.resident)
            if report.waiting is not None:
                adapters.waiting = Counter(report.waiting)
        if report.state is not None:
            self._state = report.state
        if report.jobs is not None:
            self._jobs = report.jobs

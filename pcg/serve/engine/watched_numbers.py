"""The numbers of an engine in another process, as its reports tell them.

Where somebody asks often, asking is a look at this process's memory: the engine reports until a
time that both processes know, which every question moves on, and nothing here is believed behind
it. Who asks now and then, as a database of metrics does every 15 s, has the engine asked.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.runtime.metrics.totals import Totals
from pcg.serve.engine.messages import Report, Watch, encode
from pcg.serve.engine.numbers import totals_of, with_totals

_OFTEN_S = 1.0
"""The most time between two questions for which reports are worth it."""
_WATCHED_S = 4.0
"""The time that the engine reports for, from a question on."""


class WatchedNumbers:
    """The latest numbers, for one event loop.

    Args:
        post: sends a message to the engine.
        now_s: the monotonic clock that both processes have, seconds.
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

    def numbers(self) -> EngineNumbers | None:
        """Return the numbers as they are now; None if the engine has to be asked."""
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
        """Return the jobs as of the totals; None if the engine has to be asked."""
        return self._jobs if self._now_s() < self._until_s else None

    def _watch(self, now_s: float, *, begins: bool) -> None:
        self._until_s = now_s + _WATCHED_S
        self._post(encode(Watch(self._until_s, begins)))

    def take(self, report: Report) -> None:
        """Take a report; one that was under way when nobody watched is dropped."""
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

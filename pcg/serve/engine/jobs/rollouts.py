"""Rollouts of a job: requests of its tenant's, which wait where others' do and end with the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from pcg.errors import FinetuneError, PcgError, QueueFullError
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.requests.request import Completion
from pcg.runtime.requests.stream import Stream

_MOST = 256
"""The most sequences of a job in the engine, so that the queue has room for its tenant's others."""
_AGAIN_S = 0.1
"""Time after which an engine that has too much waiting is asked again, seconds."""


class Rollout:
    """A request of a job, which is asked again while too much waits."""

    def __init__(self, ask: Callable[[], Stream], width: int) -> None:
        self.width = width
        self.is_taken = False
        self._ask = ask
        self._stream = ask()

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    def wait_all(self) -> list[Completion]:
        """Wait for all of its completions; errors as of `Stream`, or that the job has ended."""
        while True:
            try:
                found = self._stream.wait_all()
            except QueueFullError:
                time.sleep(_AGAIN_S)
                self._stream = self._ask()
            else:
                self.is_taken = True
                return found

    def cancel(self) -> None:
        """End it."""
        self._stream.cancel()


class Rollouts:
    """An engine as the loop of a job asks it, from the job's thread.

    Args:
        tenant: whose requests they are.
        queue: the most sequences of a tenant that may wait; None for no bound.
    Attributes:
        has_ended: True once nothing more may be asked.
    """

    def __init__(self, engine: AsyncEngine, tenant: str, queue: int | None) -> None:
        self._engine = engine
        self._most = _MOST if queue is None else min(_MOST, queue)
        self._tenant = tenant
        self._asked: list[Rollout] = []
        self._running: list[Rollout] = []
        self.has_ended = False

    def submit(self, *args: Any, **fields: object) -> Rollout:
        """Submit a prompt, once there is room for it beside those that were submitted before."""

        def ask() -> Stream:
            if self.has_ended:
                raise FinetuneError("the job was cancelled")
            return self._engine.submit(*args, **fields, tenant=self._tenant)  # type: ignore[arg-type]

        width = cast(int, fields.get("n", 1))
        while self._running and sum(one.width for one in self._running) + width > self._most:
            with suppress(PcgError):  # who waits for its completions is told
                self._running[0].wait_all()
            self._running = [one for one in self._running if not one.is_over]
        made = Rollout(ask, width)
        self._running.append(made)
        self._asked = [*(one for one in self._asked if not one.is_taken), made]
        if self.has_ended:  # meanwhile
            made.cancel()
        return made

    def end(self) -> None:
        """End all of them, from any thread, and ask nothing more."""
        self.has_ended = True
        for one in list(self._asked):
            one.cancel()

"""Steps of an engine that a test lets run, or watches."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Any

from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.step import Results
from tests.support.waiting import until

_CLOSED_S = 2e-3
"""Time that a step waits to be let; the engine's thread takes calls between two of them."""


class StepGate:
    """Stands before the steps of an engine on a thread, closed at first; calls go on meanwhile.

    A step that only hands out what has ended is always let.
    """

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._step = engine.step
        self._changed = Condition()
        self._left = 0
        self._is_open = self._is_running = False
        engine.step = self._gated  # type: ignore[method-assign]

    def _gated(self) -> list[Chunk]:
        scheduler = self._engine.scheduler
        if not scheduler.is_empty or self._engine.jobs:
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_open or self._left, _CLOSED_S):
                    return []
                self._left -= not self._is_open
                self._is_running = True
        try:
            return self._step()
        finally:
            with self._changed:
                self._is_running = False

    def let(self, steps: int = 1) -> None:
        """Let so many steps that do something run."""
        with self._changed:
            self._left += steps
            self._changed.notify_all()

    def let_until(self, happened: Callable[[], bool]) -> None:
        """Let steps run, one by one, until something has happened; none begins after that."""

        def has() -> bool:
            with self._changed:
                if happened():
                    return True
                if not self._is_running:
                    self._left = 1
                    self._changed.notify_all()
            return False

        until(has)
        with self._changed:
            self._left = 0

    def open(self) -> None:
        """Let all steps run from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


def when_read(running: Any, before: Callable[[], object], after: Callable[[], object]) -> Any:
    """The step, which calls functions before and after its results are read."""
    read = running.read

    def watched() -> Results:
        before()
        results: Results = read()
        after()
        return results

    running.read = watched
    return running


def nothing() -> None:
    """Do nothing."""

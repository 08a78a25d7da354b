"""An engine's thread whose steps a test lets go one by one, so that nothing depends on time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any

from pcg.runtime.engine.async_engine import AsyncEngine

_LONGEST_S = 60.0


class HeldSteps:
    """The steps of an engine, each of which waits until it is allowed.

    Attributes:
        begun, done: how many came to their beginnings and to their ends.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        self.begun = self.done = 0
        self._step = step
        self._allowed = 0.0
        self._changed = Condition()

    def __call__(self) -> Any:
        """Run a step once it is allowed, on the engine's thread."""
        with self._changed:
            self.begun += 1
            self._changed.notify_all()
            self._wait(lambda: self._allowed >= self.begun)
        found = self._step()
        with self._changed:
            self.done += 1
            self._changed.notify_all()
        return found

    def _wait(self, happened: Callable[[], bool]) -> None:
        assert self._changed.wait_for(happened, _LONGEST_S)

    def until_held(self) -> None:
        """Wait until the engine's thread stands before a step that is not allowed."""
        with self._changed:
            self._wait(lambda: self.begun > self._allowed)

    def run(self, until: Callable[[], bool]) -> None:
        """Let steps go one by one until something has happened, which then stays so."""
        self.until_held()
        while not until():
            with self._changed:
                self._allowed += 1
            self._tell()
            self.until_held()

    def go_on(self) -> None:
        """Allow all steps."""
        self._allowed = math.inf
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


@contextmanager
def held_steps(running: AsyncEngine) -> Iterator[HeldSteps]:
    """Hold the steps of an engine until the end of the `with`, as far as the test allows none."""
    engine: Any = running.engine
    held = HeldSteps(engine.step)
    engine.step = held
    try:
        yield held
    finally:
        held.go_on()
        del engine.step

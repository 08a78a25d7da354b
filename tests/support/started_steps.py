"""Steps that a device was asked to start, watched by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pcg.runtime.requests.step import Results


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

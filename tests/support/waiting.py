"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(happened: Callable[[], bool], timeout_s: float = 60.0, every_s: float = 0.005) -> None:
    """Return when it has happened; fails when it has not after so long."""
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(every_s)

"""A log that clients cannot fill: what they cause is said a few times a second."""

from __future__ import annotations

import logging
import time

_LINES_PER_S = 5.0
_MOST_AT_ONCE = 50


class LimitedLog:
    """Says lines, as long as there are few.

    Attributes:
        left_out: lines that were not said since the last one that was.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._allowed = float(_MOST_AT_ONCE)
        self._seen_s = time.monotonic()
        self.left_out = 0

    def say(self, level: int, text: str, *values: object, error: bool = False) -> None:
        """Log a line; with `error` the traceback of what is handled now stands below it."""
        now_s = time.monotonic()
        more = (now_s - self._seen_s) * _LINES_PER_S
        self._allowed, self._seen_s = min(_MOST_AT_ONCE, self._allowed + more), now_s
        if self._allowed < 1:
            self.left_out += 1
            return
        self._allowed -= 1
        if self.left_out:
            text, values = f"{text} (%d lines before it are left out)", (*values, self.left_out)
            self.left_out = 0
        self._logger.log(level, text, *values, exc_info=error)

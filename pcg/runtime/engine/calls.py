"""Calls of an engine's thread: functions of others that it runs between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Call:
    """A function to run on the thread, and its result."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self._act = act

    def run(self) -> None:
        try:
            self.future.set_result(self._act())
        except Exception as error:  # the caller's, not the thread's
            self.future.set_exception(error)

"""The cancelling of a job whose data is prepared, on whichever thread or process that is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import Lock

from pcg.errors import FinetuneError


class Cancelling:
    """Is cancelled once, from any thread; then calls what ends the work under way."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = Lock()
        self._is_cancelled = False
        self._acts: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def error(self) -> FinetuneError:
        """The error that a job ends with that was cancelled."""
        return FinetuneError(f"job {self._job!r} was cancelled")

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            acts, self._acts = self._acts, []
        for act in acts:
            act()

    def check(self) -> None:
        """Raise a FinetuneError if it was cancelled."""
        if self._is_cancelled:
            raise self.error

    def add(self, act: Callable[[], None]) -> None:
        """Call a function, which must not wait, once it is cancelled; now if it is already."""
        with self._lock:
            is_late = self._is_cancelled
            if not is_late:
                self._acts.append(act)
        if is_late:
            act()

    @contextlib.contextmanager
    def to(self, act: Callable[[], None]) -> Iterator[None]:
        """Call a function, which must not wait, if it is cancelled before the block ends."""
        self.add(act)
        try:
            yield
        finally:
            with self._lock:
                if act in self._acts:
                    self._acts.remove(act)

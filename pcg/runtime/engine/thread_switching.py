"""Python's thread switch interval, which is of the process, while engines and servers run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()
_INTERVALS_S: list[float] = []
"""The interval before all uses, then that of each use; empty without any."""


@contextmanager
def switching_every(interval_s: float) -> Iterator[None]:
    """Let threads switch at least this often; the last of several uses restores the interval."""
    with _LOCK:
        if not _INTERVALS_S:
            _INTERVALS_S.append(sys.getswitchinterval())
        _INTERVALS_S.append(interval_s)
        sys.setswitchinterval(min(_INTERVALS_S))
    try:
        yield
    finally:
        with _LOCK:
            _INTERVALS_S.remove(interval_s)
            sys.setswitchinterval(min(_INTERVALS_S))
            if len(_INTERVALS_S) == 1:
                _INTERVALS_S.clear()

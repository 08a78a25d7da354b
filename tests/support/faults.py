"""Faults: errors that are raised where one of pcg's functions is entered, on the calling thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pcg

_ROOT = str(Path(pcg.__file__).parent)


class Fault(Exception):
    """An error that nobody expects."""


def is_fault(error: BaseException | None) -> bool:
    """Return True for a `Fault`, and for an error that it caused."""
    while error is not None and not isinstance(error, Fault):
        error = error.__cause__ or error.__context__
    return error is not None


def name_of(frame: FrameType) -> str | None:
    """Return the function of a frame by its file in the package; None for any other function.

    Generator expressions are entered again where they are collected, and so are left out.
    """
    code = frame.f_code
    if not code.co_filename.startswith(_ROOT) or code.co_name == "<genexpr>":
        return None
    return f"{code.co_filename.removeprefix(_ROOT)}:{code.co_qualname}"


class Entered:
    """Notes which functions are entered.

    Args:
        is_hit: tells of a frame, which has its arguments by now, whether it is noted.
    """

    def __init__(self, is_hit: Callable[[FrameType], bool] = lambda frame: True) -> None:
        self.names: set[str] = set()
        self._is_hit = is_hit

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        name = name_of(frame)
        if name is not None and self._is_hit(frame):
            self.names.add(name)


class Raising:
    """Raises a `Fault` where a function is entered for the nth time.

    Python ends the tracing of a thread with what a trace function raises. With `ever` it raises
    again whenever tracing begins again.

    Attributes:
        fired: how often it raised.
    """

    def __init__(
        self,
        name: str,
        nth: int = 1,
        is_hit: Callable[[FrameType], bool] = lambda frame: True,
        *,
        ever: bool = False,
    ) -> None:
        self.fired = 0
        self._name, self._left, self._is_hit, self._ever = name, nth, is_hit, ever

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if (self.fired and not self._ever) or name_of(frame) != self._name:
            return
        if not self._is_hit(frame):
            return
        self._left -= 1
        if self._left <= 0:
            self.fired += 1
            raise Fault(f"in {self._name}")


@contextmanager
def traced(trace: Entered | Raising | None) -> Iterator[None]:
    """Have a function called wherever another one is entered on this thread."""
    before = sys.gettrace()
    if trace is not None:
        sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

"""Faults: errors that are raised where one of pcg's functions is entered, on the calling thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pcg

ROOT = str(Path(pcg.__file__).parent)


class Fault(Exception):
    """An error that nobody expects."""


def name_of(code: CodeType) -> str:
    """Return a function's file within the package, and its name there."""
    return f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}"


@contextmanager
def entered(found: dict[str, int]) -> Iterator[None]:
    """Count how often each function of the package is entered."""

    def trace(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_filename.startswith(ROOT):
            name = name_of(frame.f_code)
            found[name] = found.get(name, 0) + 1

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Raising:
    """Raises a `Fault` where a function is entered for the nth time, once, or each time.

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

    def trace(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or name_of(code) != self._name:
            return
        if (self.fired and not self._ever) or not self._is_hit(frame):
            return
        self._left -= 1
        if self._left <= 0:
            self.fired += 1
            raise Fault(f"in {self._name}")

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Raise meanwhile; what raises ends the tracing of a thread, so enter it for each step."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)

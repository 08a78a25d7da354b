"""Interrupts: defer Ctrl-C while something must happen as a whole, or on all ranks."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

Interrupt = tuple[int, FrameType | None]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer SIGINT to the end of the block; the handler before the block then runs."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    with noted_interrupts() as came:
        yield
    if came:
        before(*came[0])


@contextmanager
def noted_interrupts() -> Iterator[list[Interrupt]]:
    """Append SIGINT within the block to the list, and do nothing else.

    Python calls handlers in the main thread alone, so in other threads there is nothing to note.
    """
    came: list[Interrupt] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)

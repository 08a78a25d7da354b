"""Futures of what functions make of the results of others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Found = TypeVar("Found")
Result = TypeVar("Result")


def then(future: Future[Found], act: Callable[[Found], Result]) -> Future[Result]:
    """Return the future of what a function makes of another one's result."""
    made: Future[Result] = Future()

    def go_on(done: Future[Found]) -> None:
        try:
            made.set_result(act(done.result()))
        except Exception as error:
            made.set_exception(error)

    future.add_done_callback(go_on)
    return made

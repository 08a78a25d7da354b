"""A call of a trainer: a command that waits for its turn, runs, or is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

from pcg.errors import FinetuneError
from pcg.runtime.training.trainer.commands import Stages
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter

Result = TypeVar("Result")


class TrainerCall(Generic[Result]):
    """The result of a command, later: `await call`, or `call.wait()` in a thread.

    Attributes:
        is_cancelled: True once it was asked to end.
        begin: returns its stages, once it is its turn.
    """

    def __init__(
        self,
        what: str,
        begin: Callable[[TrainedAdapter | None], Stages[Result]],
        cancel: Callable[[TrainerCall[Any]], None],
    ) -> None:
        self.is_cancelled = False
        self.begin = begin
        self._what = what
        self._cancel = cancel
        self._done: Future[Result] = Future()
        self._done.set_running_or_notify_cancel()  # cancelling a wait must not cancel it

    @property
    def is_over(self) -> bool:
        return self._done.done()

    @property
    def future(self) -> Future[Result]:
        """The result as a future, whose end other threads can be told of."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait for the result in a thread. TimeoutError: it is not there after so long."""
        return self._done.result(timeout_s)

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._done).__await__()

    def cancel(self) -> None:
        """End it before or while it runs; what it would have changed is as before it."""
        self.is_cancelled = True
        self._cancel(self)

    def finish(self, result: Result) -> None:
        """Pass the result on."""
        with contextlib.suppress(InvalidStateError):
            self._done.set_result(result)

    def fail(self, error: BaseException | None = None) -> None:
        """End with an error, by default that it was cancelled; nothing happens if it is over."""
        with contextlib.suppress(InvalidStateError):
            self._done.set_exception(error or FinetuneError(f"{self._what} was cancelled"))

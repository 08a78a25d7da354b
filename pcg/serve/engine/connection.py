"""The server's end of the connection to its engine's process: messages, calls and its end.

Before the event loop runs, and after it, whoever waits for an answer reads; while it runs, the loop
does. Messages of one turn of the loop are sent together.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from pcg.errors import EngineError
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.messages import Answer, Call, Ended, ToServer, decoder, encode
from pcg.serve.engine.translation import error_of

Result = TypeVar("Result")

_CLOSING_S = 5.0
"""Time that the engine has to end after the step that is under way, seconds."""
_ENDING_S = 1.0
"""Time that a process takes at most to end once its socket is closed, seconds."""
_SWITCH_S = 1e-4
"""A turn of Python's threads here: the event loop does not wait 5 ms for one that tokenizes."""


class Connection:
    """Sends messages to the engine's process, and hears what it says.

    Attributes:
        ended: the reason why nothing comes any more; None before the end.

    Args:
        take: takes messages, but for answers to calls.
        lose: is called with the reason once nothing comes any more.
    """

    def __init__(
        self,
        channel: Channel,
        process: SpawnProcess,
        take: Callable[[list[ToServer]], None],
        lose: Callable[[EngineError], None],
    ) -> None:
        self.ended: EngineError | None = None
        self._channel = channel
        self._process = process
        self._take = take
        self._lose = lose
        self._ids = itertools.count()
        self._calls: dict[int, tuple[Future[Any], Callable[[Answer], None]]] = {}
        self._decode = decoder(ToServer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._unsent: list[bytes] = []

    # ------------------------------------------------------------------------------- sending

    def post(self, message: bytes) -> None:
        """Send a message, from any thread; never waits."""
        if self._loop is None or threading.get_ident() != self._thread:
            self._channel.send(message)
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages:
            self._channel.send(*messages)

    def call(
        self,
        function: str,
        kind: Any,
        then: Callable[[Any], Result],
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Future[Result]:
        """Call a function of the engine's process; returns what `then` makes of its result.

        Args:
            kind: the type of the result in messages.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        if self.ended is not None:
            future.set_exception(self.ended)
            return future

        def settle(answer: Answer) -> None:
            try:
                if answer.fault is not None:
                    raise error_of(answer.fault)
                future.set_result(then(decoder(kind)(answer.result)))
            except Exception as error:
                future.set_exception(error)

        id = next(self._ids)
        self._calls[id] = future, settle
        self.post(encode(Call(id, function, dict(arguments))))
        return future

    # ------------------------------------------------------------------------------- hearing

    def wait(self, future: Future[Result]) -> Result:
        """Wait for a call's result where no event loop runs."""
        while not future.done():
            self.hear(waits=True)
        return future.result()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have the running event loop hear what comes, within a `with`."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._loop.add_reader(self._channel.fileno(), self.hear)
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, interval_s))
        try:
            yield
        finally:
            sys.setswitchinterval(interval_s)
            self._loop.remove_reader(self._channel.fileno())
            self._flush()
            self._loop = None

    def hear(self, *, waits: bool = False) -> None:
        """Take the messages that have come."""
        if self.ended is not None:
            return
        found = self._channel.read(waits=waits)
        if found is None:
            self._end(EngineError(f"the engine's process ended{self._cause()}"))
            return
        try:
            messages = [self._decode(one) for one in found]
        except msgspec.MsgspecError as error:
            self._end(EngineError(f"the engine's process sent what is no message: {error}"))
            return
        last = messages[-1] if messages else None
        self._take([one for one in messages if not isinstance(one, Answer | Ended)])
        for one in messages:
            if isinstance(one, Answer):
                self._calls.pop(one.id)[1](one)
        if isinstance(last, Ended):
            self._end(EngineError(last.text))

    def _end(self, error: EngineError) -> None:
        """Note that nothing comes any more, and tell all that wait."""
        self.ended = error
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
        self._lose(error)
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            future.set_exception(error)

    def _cause(self) -> str:
        """Return how the process ended, behind a text that says so."""
        self._process.join(_ENDING_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return "" if not code else f" with {code}"
        return f" by {signal.Signals(-code).name}"

    def close(self, *, at_once: bool) -> None:
        """Have the engine end after its step; where it does not, or at once, end its process."""
        if not at_once:
            self.call("close", type(None), lambda _: None)
        until = time.monotonic() + (0.0 if at_once else _CLOSING_S)
        while self.ended is None and self._channel.can_read(max(0.0, until - time.monotonic())):
            self.hear(waits=True)
        if self.ended is None:
            self._process.kill()
        self._channel.close()
        self._process.join()
        self._process.close()

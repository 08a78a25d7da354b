"""The driver: tells the other ranks what is done on the first one, before or right after it is.

An order at whose place ranks exchange nothing is done here at once, and told with the next message;
so all requests that come between two steps travel with the step. Any other order is told first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pcg.errors import GenerationError, RankLostError
from pcg.peft.adapter import Adapter
from pcg.ranks.line import Line
from pcg.runtime.engine.ranks.known_versions import ToldVersions
from pcg.runtime.engine.ranks.orders import End, Message, Order, Submit, encode
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import PlainRequest
from pcg.runtime.requests.request import Request


class Driver:
    """Drives the other ranks; called by the engine's thread alone.

    Attributes:
        is_lost: True once a message did not reach all others.
    """

    def __init__(self, line: Line, state: ModelState) -> None:
        self.is_lost = False
        self._line = line
        self._state = state
        self._told = ToldVersions(state)
        self._pending: list[msgspec.Raw] = []
        self._failed: list[int] = []
        self._orders = 0
        state.versions.agreed = self._tell_alive

    @contextmanager
    def asked(self, order: Order, *, at_once: bool = True) -> Iterator[None]:
        """Do an order within a `with`; all ranks do it.

        Args:
            at_once: tell it first, as ranks exchange messages where they do it.
        Raises:
            GenerationError: it holds a number or a text that no message can.
            RankLostError: another rank is gone.
        """
        try:
            self._pending.append(msgspec.Raw(encode(order)))
        except (OverflowError, UnicodeEncodeError) as error:
            raise GenerationError(
                f"what was asked for cannot be told to the other ranks ({error}); use numbers of "
                "64 bits, and characters of Unicode"
            ) from None
        number, self._orders = self._orders, self._orders + 1
        if at_once:
            self.tell()
        try:
            yield
        except Exception:
            self._failed.append(number)
            raise

    def tell(self) -> None:
        """Send what was not told yet, or nothing but that this rank is there."""
        message = Message(self._pending, self._failed, self._told.take_released())
        self._pending, self._failed = [], []
        self._send(encode(message))

    def submitted(self, request: Request, submitted_s: float) -> Submit:
        """Return the order of a request. AdapterError: its adapter was never served here."""
        adapter = request.adapter
        named = None if adapter is None else self._told.name_of(adapter)  # type: ignore[arg-type]
        return Submit(PlainRequest.of(request, named), submitted_s)

    def end(self, why: str) -> None:
        """Let the other ranks go; nothing is told any more."""
        with self.asked(End(why)):
            pass

    def close(self) -> None:
        """Drive nobody any more."""
        self._state.versions.agreed = None
        self._told.close()

    def _tell_alive(self, alive: list[Adapter]) -> list[Adapter]:
        self._send(encode([self._told.name_of(adapter) for adapter in alive]))
        return alive

    def _send(self, message: bytes) -> None:
        try:
            self._line.send(message)
        except RankLostError:
            self.is_lost = True
            raise

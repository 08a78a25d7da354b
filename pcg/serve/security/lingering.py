"""Connections that end before their request's body: what still comes is read and forgotten.

A system answers bytes that nobody reads by a reset, which drops the reply before the client has
seen it: it would know of a broken connection, and ask again, where a 413 or a 401 was sent.

Source: RFC 9112, §9.6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_BYTES = 2**24
LINGER_S = 2.0
"""The most bytes that are forgotten, and the longest time."""


class LingeringTransport(asyncio.Transport):
    """A connection's transport, which closes in two steps while a body is under way.

    Args:
        transport: the connection's own.
        is_awaited: returns True while a body has not come to its end.
        resume: has the transport read, if the protocol stopped it.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        is_awaited: Callable[[], bool],
        resume: Callable[[], None],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._is_awaited = is_awaited
        self._resume = resume
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = 0
        self.write = transport.write  # type: ignore[method-assign]

    def close(self) -> None:
        """End the connection; the client reads what was written, and is told that it ends."""
        if self._transport.is_closing() or not self._is_awaited():
            self._transport.close()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LINGER_S, self._transport.close)
            if self._transport.can_write_eof():  # not that of https
                self._transport.write_eof()
            self._resume()

    def abort(self) -> None:
        """End the connection at once: its client has left."""
        self._transport.abort()

    def forgets(self, data: bytes) -> bool:
        """Return True if what came is forgotten, as the connection ends."""
        if self._timer is None:
            return False
        self._bytes += len(data)
        if self._bytes > LINGER_BYTES:
            self._transport.close()
        return True

    def lost(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

"""Connections of strangers: the bounds of a request's head, and the end of a connection.

uvicorn's protocol bounds neither the bytes of a head nor its time. Here a head beyond `HEAD_BYTES`,
or one that is incomplete after `HEAD_S`, ends its connection. Headers behind a body are dropped:
what a request may do is decided by its head. A request that offers another protocol is served in
this one, with its body, as Java's client expects of every server that has no HTTP/2.

A connection that ends before its request's body reads and forgets the rest of it: a system answers
unread bytes by a reset, which drops the reply before the client has seen it. The client would know
of a broken connection, and ask again, where a 413 or a 401 was sent.

A client that ends its side of the connection behind a request is answered. Whether it has left
altogether, the system says once something was sent to it: after `LEFT_S` that is an interim reply
100, which clients skip.

Source: RFC 9110, §7.8 and §15.2; RFC 9112, §9.6.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
        if self._timer is not None:
            self._timer.cancel()

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


# --------------------------------------------------------------------------------------- connection


HEAD_BYTES = 64 * 2**10
HEAD_S = 30.0
LEFT_S = 1.0
"""The time after which a client that ended its side is looked for, seconds."""
_LOOKS_S = 0.25
"""The time between two looks, seconds."""
_FILES = 2**16


_OFFERS = (b"upgrade", b"http2-settings")
"""Headers of a request that offers another protocol."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with bounds."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head_bytes = 0
        self._headers_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._lingering: LingeringTransport
        self._fed = self._left = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lingering = LingeringTransport(transport, self._awaits_body, self.flow.resume_reading)
        self.transport = self._lingering
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        if self._look is not None:
            self._look.cancel()
        self._lingering.lost()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the client is answered before the connection ends, where TLS lets it."""
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if not is_asked or self._awaits_body() or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        self._look = self.loop.call_later(LEFT_S, self._find_left, True)
        return True

    def _find_left(self, sends: bool) -> None:
        """End the connection of a client that has left.

        Args:
            sends: send something, which tells: the system answers what nobody can read by a reset.
        """
        if self.transport.is_closing():
            return
        end: socket.socket = self.transport.get_extra_info("socket")
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._lingering.abort()
            return
        cycle = self.cycle
        if sends and not (self.pipeline or cycle.response_started or self._is_old):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not cycle.response_complete:
            self._look = self.loop.call_later(_LOOKS_S, self._find_left, False)

    @property
    def _is_old(self) -> bool:
        """True for a request by HTTP/1.0, which has no interim replies."""
        return bool(self.scope["http_version"] == "1.0")

    @property
    def _is_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """True between two requests, before anything of the next one has come."""
        return self._is_answered and not self._in_head and not self._awaits_body()

    def _awaits_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def _begin_head(self) -> None:
        self._end_timer()
        self._in_head, self._head_bytes, self._headers_bytes = True, 0, 0
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        if self._lingering.forgets(data):
            return
        left = memoryview(data)
        while left:
            self._fed, self._left = left, left[:0]
            super().data_received(cast(bytes, left))
            left = self._left
        if self._is_idle:  # what came begins no request, as empty lines and an upgrade do not
            self._begin_head()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one behind a body; the parser answers what is raised by a 400."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > HEAD_BYTES:
            raise ValueError("the head is too long")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # whose body the parser leaves alone
            return
        self._in_head = False
        self._end_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False  # also where the reply came first

    def _unsupported_upgrade_warning(self) -> None:
        """Parse a request's head anew without what offers another protocol; its body is left."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        method = self.parser.get_method()
        if method == b"CONNECT":  # which is never without
            self.send_400_response("Invalid HTTP request received.")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name not in _OFFERS:
                kept = _without_upgrade(value) if name == b"connection" else value
                lines.append(name + b": " + kept)
        self._left = self._fed[upgrade.args[0] :]
        self.parser = _parser(self)
        super().data_received(b"\r\n".join([*lines, b"", b""]))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered and self._awaits_body() and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)


def _without_upgrade(connection: bytes) -> bytes:
    """Return the value of a Connection header without what names the headers of an offer."""
    words = (word.strip() for word in connection.split(b","))
    return b", ".join(word for word in words if word.lower() not in _OFFERS)


def _parser(connection: BoundedConnection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def allow_connections() -> None:
    """Let this process have as many open files, connections among them, as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

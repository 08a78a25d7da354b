"""Connections of untrusted clients: limits of a request's head, and a clean end of a connection.

uvicorn's protocol limits neither the bytes nor the time of a head. `BoundedConnection` closes the
connection of a head of more than `HEAD_BYTES`, or of a head that is incomplete after `HEAD_S`. It
drops trailers, because only the head decides a request's permissions. It ignores an offer to
upgrade the protocol and reads the body, as Java's client expects of servers without HTTP/2.

A connection that ends before its request's body reads and discards the rest. The system answers
unread bytes by a reset, which drops the reply before the client reads it; instead of a 413 or a
401, the client would see a broken connection and retry.

A client that half-closes the connection after a request is answered. Whether it has closed both
directions, the system reports only after a send: after `LEFT_S`, the server sends an interim reply
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
"""Limits of the discarded bytes, and of the time to discard them, seconds."""


class LingeringTransport(asyncio.Transport):
    """A connection's transport that closes in two steps while a body is incomplete.

    Args:
        transport: the connection's transport.
        is_awaited: returns True while a body is incomplete.
        resume: resumes reading if the protocol paused it.
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
        """Close the connection after the client has received the written bytes and the end."""
        if self._transport.is_closing() or not self._is_awaited():
            self._transport.close()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LINGER_S, self._transport.close)
            if self._transport.can_write_eof():  # False for https
                self._transport.write_eof()
            self._resume()

    def abort(self) -> None:
        """Close the connection immediately: its client has disconnected."""
        self._transport.abort()

    def forgets(self, data: bytes) -> bool:
        """Discard received bytes of a closing connection; return False if it is not closing."""
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
"""Time after a half-close until the client is probed, seconds."""
_LOOKS_S = 0.25
"""Time between two checks of the probe's result, seconds."""
_FILES = 2**16


_OFFERS = (b"upgrade", b"http2-settings")
"""Headers of an offer to upgrade the protocol."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits."""

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
        """Keep a half-closed connection open (True) to answer its request; TLS cannot."""
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if not is_asked or self._awaits_body() or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        self._look = self.loop.call_later(LEFT_S, self._find_left, True)
        return True

    def _find_left(self, sends: bool) -> None:
        """Close the connection of a disconnected client.

        Args:
            sends: send a probe, which the system of a disconnected client answers by a reset.
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
        """True between two requests, before the first byte of the next request."""
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
        if self._is_idle:  # the bytes start no request, such as empty lines or an upgrade
            self._begin_head()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; drop a trailer. The parser answers an exception by a 400."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > HEAD_BYTES:
            raise ValueError("the head is too long")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # the parser does not read the body
            return
        self._in_head = False
        self._end_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False  # also if the reply was sent first

    def _unsupported_upgrade_warning(self) -> None:
        """Parse a request's head again without its offer to upgrade; keep its body unread."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        method = self.parser.get_method()
        if method == b"CONNECT":  # always an upgrade
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
    """Return the value of a Connection header without the names of upgrade headers."""
    words = (word.strip() for word in connection.split(b","))
    return b", ".join(word for word in words if word.lower() not in _OFFERS)


def _parser(connection: BoundedConnection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def allow_connections() -> None:
    """Raise this process's limit of open files, and so of connections, as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

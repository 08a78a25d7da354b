"""Connections of strangers: how long the head of a request may be, and take.

uvicorn's protocol bounds neither, and goes on to read a body that nobody wants. Here a head beyond
`HEAD_BYTES`, or one that is not there after `HEAD_S`, ends its connection, and so does a reply that
ends before its request. Headers behind a body are dropped: what a request may do is decided by its
head. A request that offers another protocol is served in this one, with its body, as Java's client
expects of every server that has no HTTP/2.

Source: RFC 9110, §7.8.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pcg.serve.security.lingering import LingeringTransport

HEAD_BYTES = 64 * 2**10
HEAD_S = 30.0
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
        self._lingering: LingeringTransport
        self._fed = self._left = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lingering = LingeringTransport(transport, self._awaits_body, self.flow.resume_reading)
        self.transport = self._lingering
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self._lingering.lost()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """True between two requests, before anything of the next one has come."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and not self._in_head

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
        if self._awaits_body():
            self.transport.close()
        super().on_response_complete()


def _without_upgrade(connection: bytes) -> bytes:
    """Return the value of a Connection header without what names the headers of an offer."""
    words = (word.strip() for word in connection.split(b","))
    return b", ".join(word for word in words if word.lower() not in _OFFERS)


def _parser(connection: BoundedConnection) -> httptools.HttpRequestParser:
    """Return a parser as uvicorn's connections have it."""
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

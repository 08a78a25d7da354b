"""The socket of a server, bound before the model is loaded, so that a used port fails immediately.

Until the server takes requests, a thread answers them by 503. This module has only fast imports, so
the thread starts in the first second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import ssl
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from pcg.errors import ServeError
from pcg.files import shown_path
from pcg.serve.engine.options import ServeOptions

_BACKLOG = 2048
_HEAD_S = 10.0
"""Time limit of a request's head before a 503, seconds."""
_LINGER_S, _LINGER_BYTES = 2.0, 2**24
"""Limits of the time and the bytes of a body that is read after the 503, so that the client reads
the reply."""
_STARTING = json.dumps(
    {
        "error": {
            "message": "The server is starting; ask again later.",
            "type": "server_error",
            "param": None,
            "code": "starting",
        }
    }
).encode()


class Listener:
    """The socket of a server; it answers every request by 503 until a server takes it.

    Raises:
        ServeError: cannot listen at the address, or cannot use the certificate.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._context = None
        if options.ssl_certfile is not None:
            self._context = check_certificate(options.ssl_certfile, options.ssl_keyfile)
        self.socket = listen(options.host, options.port, options.stream_timeout_s)
        self.answer()

    @property
    def url(self) -> str:
        return url_of(self.socket, is_secure=self._context is not None)

    def answer(self) -> None:
        """Answer every request by 503 until `take`: at startup, and after a server has ended."""
        self._loop = asyncio.new_event_loop()
        self._is_taken = asyncio.Event()
        self._handed = Future[None]()
        Thread(target=self._run, name="pcg starting", daemon=True).start()

    def take(self) -> socket.socket:
        """Stop answering and return the socket."""
        if not self._handed.done():
            with contextlib.suppress(RuntimeError):  # another call closed the loop
                self._loop.call_soon_threadsafe(self._is_taken.set)
            self._handed.result()
        return self.socket

    def close(self) -> None:
        self.take().close()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the server
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._answer())

    async def _answer(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with (
                contextlib.closing(writer),
                contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError),
            ):
                await _refuse(reader, writer)

        shared = self.socket.dup()
        server = await asyncio.start_server(
            answer, sock=shared, ssl=self._context, backlog=_BACKLOG, limit=2**16
        )
        await self._is_taken.wait()
        server.close()
        self._handed.set_result(None)
        await asyncio.sleep(0)  # accepted connections become tasks
        replies = asyncio.all_tasks() - {asyncio.current_task()}
        if replies:
            _, late = await asyncio.wait(replies, timeout=_LINGER_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await asyncio.sleep(0)  # their connections close


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(_HEAD_S):
        head = await reader.readuntil(b"\r\n\r\n")
    content = b"" if head.startswith(b"HEAD ") else _STARTING
    writer.write(
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nretry-after: 5\r\nconnection: close\r\n\r\n%s"
        % (len(_STARTING), content)
    )
    if writer.can_write_eof():
        writer.write_eof()
    await writer.drain()
    left = _LINGER_BYTES
    async with asyncio.timeout(_LINGER_S):
        while left > 0 and (part := await reader.read(2**16)):
            left -= len(part)


def listen(host: str, port: int, unread_s: float = 60.0) -> socket.socket:
    """Return a socket bound to an address.

    Args:
        unread_s: time after which the system drops the connection of a client that does not read,
            seconds; a server cannot free the unsent bytes of a connection that it has given up.
    Raises:
        ServeError: the address is not of this machine, or the port is in use.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServeError(
            f"host={host!r} is not an address: {error}; use 127.0.0.1, or 0.0.0.0 for all addresses"
        ) from error
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            with contextlib.suppress(OSError):  # :: then also includes all IPv4 addresses
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * unread_s))
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} of {host} is in use; stop the program that listens there, or choose "
                "another port by --port (0 takes a free port)"
            ) from error
        raise ServeError(f"cannot listen at {host} port {port}: {error.strerror}") from error
    return bound


def check_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context of a server. ServeError: the certificate cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        files = shown_path(certificate) if key is None else f"{certificate} with {key}"
        raise ServeError(f"{files} cannot be used for https: {error}") from error
    return context


def url_of(bound: socket.socket, *, is_secure: bool) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' if is_secure else ''}://{shown}:{port}"

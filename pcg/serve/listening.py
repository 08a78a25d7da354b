"""The socket of a server, bound before the model is loaded: a taken port is known at once."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from pathlib import Path

from pcg.errors import ServeError
from pcg.files import shown_path

_BACKLOG = 2048


def listen(host: str, port: int, unread_s: float = 60.0) -> socket.socket:
    """Return a socket that is bound to an address.

    Args:
        unread_s: time after which the system drops a connection whose client reads nothing,
            seconds; a server that has given it up cannot free what waits to be sent.
    Raises:
        ServeError: the address is none of this machine's, or another program has the port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServeError(
            f"host={host!r} is no address: {error}; use 127.0.0.1, or 0.0.0.0 for all addresses"
        ) from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            with contextlib.suppress(OSError):  # :: is then all addresses, of version 4, too
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections have it of this socket
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * unread_s))
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} of {host} is in use; stop what listens there, or give another one by "
                "--port (0 takes a free one)"
            ) from error
        raise ServeError(f"cannot listen at {host} port {port}: {error.strerror}") from error
    return bound


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Raise a ServeError if a server cannot use a certificate with a key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        files = shown_path(certificate) if key is None else f"{certificate} with {key}"
        raise ServeError(f"{files} cannot be used for https: {error}") from error


def url_of(bound: socket.socket, *, is_secure: bool) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' if is_secure else ''}://{shown}:{port}"

"""CURVE: ZeroMQ's encryption, by which each end also proves who it is with a pair of keys.

It is CurveZMQ (RFC 26 of ZeroMQ), of Curve25519 and Salsa20-Poly1305, and replaces mutual
TLS, which ZeroMQ's TCP does not speak. There are no authorities and no dates: a base has a
certificate, with a public key that clients know, and may have a folder of its clients'.

    python -c "import zmq.auth; zmq.auth.create_certificates('.', 'base')"

makes a certificate, as `base.key` with the public key, and `base.key_secret` with both.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pcg.errors import SplitError
from pcg.files import shown_path


def zmq() -> Any:
    """Import ZeroMQ, at its first use. SplitError: it is not installed."""
    try:
        import zmq as module
        import zmq.auth
        import zmq.utils.monitor
    except ImportError:
        raise SplitError(
            "split execution between processes needs pyzmq; install pcg[split]"
        ) from None
    return module


_MAKE = "make one by: python -c \"import zmq.auth; zmq.auth.create_certificates('.', 'NAME')\""
_LENGTH = 40
"""Characters of a key, which is 32 bytes in Z85."""


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from its own machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:  # a name, and be it 127.example.org
        return False


@dataclass(frozen=True)
class BaseCurve:
    """Encryption at a base.

    Attributes:
        secret: its secret key.
        clients: names of the clients that may connect, by their public keys; None admits all.
    """

    public: bytes
    secret: bytes = field(repr=False)
    clients: Mapping[bytes, str] | None

    @classmethod
    def read(cls, certificate: Path, clients: Path | None) -> BaseCurve:
        """Read a certificate, and the folder of those of clients. SplitError: a file is damaged."""
        public, secret = _pair(certificate)
        if clients is None:
            return cls(public, secret, None)
        if not clients.is_dir():
            raise SplitError(f"{shown_path(clients)} is no folder of clients' certificates, *.key")
        names = {_public(path): path.stem for path in sorted(clients.glob("*.key"))}
        if not names:
            raise SplitError(f"{shown_path(clients)} has no certificate, *.key; {_MAKE}")
        return cls(public, secret, names)


@dataclass(frozen=True)
class ClientCurve:
    """Encryption at a client.

    Attributes:
        server: the base's public key.
        secret: the client's secret key.
    """

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, server: str | Path, certificate: Path | None) -> ClientCurve:
        """Read keys.

        Args:
            server: the base's public key, or a file with its certificate.
            certificate: a file with the client's own, secret and public; None makes a pair.
        Raises:
            SplitError: a key or a certificate is damaged.
        """
        text = str(server)
        is_key = len(text) == _LENGTH and not Path(text).exists()
        known = _checked(text.encode(), "curve_server") if is_key else _public(Path(text))
        pair = zmq().curve_keypair() if certificate is None else _pair(certificate)
        return cls(known, *pair)


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _read(path)
    if secret is None:
        raise SplitError(f"{shown_path(path)} has no secret key; give NAME.key_secret, or {_MAKE}")
    _checked(secret, shown_path(path))
    if zmq().curve_public(secret) != public:
        raise SplitError(f"{shown_path(path)} has a public key that is not its secret key's")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SplitError(f"others may read the secret key in {shown_path(path)}; chmod 600 it")
    return public, secret


def _public(path: Path) -> bytes:
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq().auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SplitError(f"{shown_path(path)} is no certificate: {error}; {_MAKE}") from None
    return _checked(public, shown_path(path)), secret


def _checked(key: bytes, where: str) -> bytes:
    try:
        if len(key) == _LENGTH:
            zmq().curve_public(key)  # decodes it
            return key
    except (ValueError, zmq().ZMQError):
        pass
    raise SplitError(f"{where}: a CURVE key has {_LENGTH} characters of Z85, as in a certificate")


class ClientKeys:
    """Answers which clients may connect, by ZAP (RFC 27 of ZeroMQ).

    Attributes:
        socket: to be polled; `answer` reads it.
    """

    def __init__(self, context: Any, clients: Mapping[bytes, str]) -> None:
        library = zmq()
        self._again = library.Again
        self._flag = library.NOBLOCK
        self._names = {library.utils.z85.decode(key): name for key, name in clients.items()}
        self.socket = context.socket(library.REP)
        self.socket.set(library.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> list[str]:
        """Answer pending requests; return the addresses of refused clients."""
        refused: list[str] = []
        while True:
            try:
                version, number, _, address, _, _, *keys = self.socket.recv_multipart(self._flag)
            except self._again:
                return refused
            name = self._names.get(keys[0]) if keys else None
            if name is None:
                refused.append(address.decode(errors="replace"))
            status = (b"400", b"unknown key", b"") if name is None else (b"200", b"", name.encode())
            self.socket.send_multipart([version, number, *status, b""])

"""A channel between two processes: length-prefixed messages over a socket.

    length [4 bytes, little-endian]   message [length bytes]

Sending never blocks. A thread sends the bytes that the socket does not accept immediately, so a
busy reader delays neither the event loop nor a step.

This module has few imports because the new process imports it first.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Thread
from typing import Any

_HEAD = 4
_READ = 2**20
_BUFFER = 2**20
"""Send buffer of the socket, bytes; the system may allow less."""


class Channel:
    """An end of a socket pair. Any thread may send; a single thread reads."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = end
        self._received = bytearray()
        self._left: deque[memoryview] = deque()
        self._changed = Condition()
        self._writer: Thread | None = None

    def fileno(self) -> int:
        """Return the file descriptor, for polling."""
        return self._socket.fileno()

    def send(self, *messages: bytes) -> None:
        """Send messages. After the other end has closed, messages are discarded."""
        whole = b"".join([part for message in messages for part in (_head(message), message)])
        with self._changed:
            sent = 0 if self._left else self._send_some(whole)
            if sent < len(whole):
                self._left.append(memoryview(whole)[sent:])
                if self._writer is None:
                    self._writer = Thread(target=self._write, name="pcg channel", daemon=True)
                    self._writer.start()
                self._changed.notify_all()

    def _send_some(self, whole: bytes | memoryview) -> int:
        """Send without blocking. Return the bytes accepted, or all of them if the peer is gone."""
        try:
            return self._socket.send(whole, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(whole)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._left))
                part = self._left[0]
            while part:
                sent = self._send_some(part)
                part = part[sent:]
                if not sent:
                    self._wait_for_room()
            with self._changed:
                self._left.popleft()
                self._changed.notify_all()

    def _wait_for_room(self) -> None:
        """Wait until the socket is writable; an event loop may have set it to non-blocking."""
        poll = select.poll()
        with contextlib.suppress(ValueError):  # another thread closed the socket
            poll.register(self._socket, select.POLLOUT)
            poll.poll()

    def read(self, *, waits: bool) -> list[bytes] | None:
        """Return the complete messages received, or None once the other end has closed.

        Args:
            waits: block until bytes arrive; they need not complete a message.
        """
        try:
            received = self._socket.recv(_READ, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        self._received += received
        return list(self._whole())

    def _whole(self) -> Iterator[bytes]:
        """Remove the complete messages from the receive buffer."""
        received, start = self._received, 0
        while len(received) - start >= _HEAD:
            end = start + _HEAD + int.from_bytes(received[start : start + _HEAD], "little")
            if end > len(received):
                break
            yield bytes(received[start + _HEAD : end])
            start = end
        del received[:start]

    def can_read(self, timeout_s: float) -> bool:
        """Return whether bytes or the end of the stream arrive within a timeout."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def close(self) -> None:
        """Close the socket after waiting up to a second for unsent bytes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, timeout=1.0)
        self._socket.close()


def _head(message: bytes) -> bytes:
    return len(message).to_bytes(_HEAD, "little")


class AtRest:
    """A picklable function that runs in a new process with garbage collection disabled.

    Imports, tracing and loading create almost no garbage, but collections took a fifth of the
    processor time of a start (`benchmarks/startup.py`). The function enables collection
    again.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _at_rest, (pickle.dumps(self._function),)


def _at_rest(function: bytes) -> Callable[..., None]:
    gc.disable()
    return pickle.loads(function)  # type: ignore[no-any-return]

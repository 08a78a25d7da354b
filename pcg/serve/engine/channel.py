"""The channel between two processes: messages as bytes over a socket, each with its length.

    length [4 bytes, the lowest first]   message [length bytes]

Sending never waits: what the socket does not take at once is sent by a thread, so neither an event
loop nor a step stands still because the other process is busy.

This module imports next to nothing, so that the process at the other end may begin with it.
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
"""Bytes that the system holds for each direction, where it allows so many."""


class Channel:
    """One end of a pair of sockets; any thread may send, and one at a time may read."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = end
        self._received = bytearray()
        self._left: deque[memoryview] = deque()
        self._changed = Condition()
        self._writer: Thread | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def send(self, *messages: bytes) -> None:
        """Send messages; nothing happens once the other end is gone, which its reader learns."""
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
        """Send what the socket takes at once, and return how much that is; all to one gone."""
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
        """Wait until the socket takes more; an event loop may have made it one that never waits."""
        poll = select.poll()
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            poll.register(self._socket, select.POLLOUT)
            poll.poll()

    def read(self, *, waits: bool) -> list[bytes] | None:
        """Return the messages that have come; None once the other end is gone.

        Args:
            waits: wait until something has come, which need not be a whole message.
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
        """Take the whole messages from what was received."""
        received, start = self._received, 0
        while len(received) - start >= _HEAD:
            end = start + _HEAD + int.from_bytes(received[start : start + _HEAD], "little")
            if end > len(received):
                break
            yield bytes(received[start + _HEAD : end])
            start = end
        del received[:start]

    def can_read(self, timeout_s: float) -> bool:
        """Wait until something has come, or the other end is gone; False if neither did."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def close(self) -> None:
        """Close it, once all was sent that the other end takes within a second."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, timeout=1.0)
        self._socket.close()


def _head(message: bytes) -> bytes:
    return len(message).to_bytes(_HEAD, "little")


class AtRest:
    """A function for a new process, which imports what it needs while its garbage collector rests.

    Next to nothing of what is imported, traced and loaded becomes garbage; going through all of it
    again and again took a fifth of the processor time of a start (`benchmarks/bench_startup.py`).
    The function has the collector collect again.
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

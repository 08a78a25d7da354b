"""A transport within one process: clients on threads, the base on another."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from itertools import count

from pcg.split.messages import Message
from pcg.split.transport import Disconnected, Endpoint, Transport


class InProcessEndpoint(Endpoint):
    """The base's end; tensors are passed on as they are, and not copied."""

    where = "this process"

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[bytes, Message] | None] = queue.SimpleQueue()
        self._replies: dict[bytes, queue.SimpleQueue[Message]] = {}
        self._closed: list[bytes] = []
        self._numbers = count(1)

    def transport(self) -> InProcessTransport:
        """Return a client's end, to be opened."""
        return InProcessTransport(self)

    def join(self) -> tuple[bytes, queue.SimpleQueue[Message]]:
        """Return the name of a new client, and its replies."""
        client = str(next(self._numbers)).encode()
        self._replies[client] = queue.SimpleQueue()
        return client, self._replies[client]

    def ask(self, client: bytes, message: Message) -> None:
        """Take a client's message."""
        self._asked.put((client, message))

    def leave(self, client: bytes) -> None:
        """Note that a client is gone."""
        self._closed.append(client)
        self._asked.put(None)

    def receive(self, timeout_s: float) -> Sequence[tuple[bytes, Message | Exception]]:
        found: list[tuple[bytes, Message | Exception]] = []
        try:
            one = self._asked.get(timeout=timeout_s) if timeout_s > 0 else self._asked.get_nowait()
            while True:
                if one is not None:
                    found.append(one)
                one = self._asked.get_nowait()
        except queue.Empty:
            return found

    def wake(self) -> None:
        self._asked.put(None)

    def send(self, client: bytes, message: Message) -> bool:
        replies = self._replies.get(client)
        if replies is not None:
            replies.put(message)
        return replies is not None

    def gone(self, clients: Sequence[bytes]) -> list[bytes]:
        left, self._closed = self._closed, []
        return [client for client in left if client in clients]

    def forget(self, client: bytes) -> None:
        self._replies.pop(client, None)

    def close(self) -> None:
        self._replies.clear()


class InProcessTransport(Transport):
    """A client's end."""

    def __init__(self, endpoint: InProcessEndpoint) -> None:
        self.where = endpoint.where
        self._endpoint = endpoint
        self._client: bytes | None = None

    def open(self) -> None:
        self._client, self._replies = self._endpoint.join()

    def exchange(self, message: Message, timeout_s: float) -> Message:
        assert self._client is not None
        self._endpoint.ask(self._client, message)
        try:
            while True:
                reply = self._replies.get(timeout=timeout_s)
                if reply.seq == message.seq and reply.op != "busy":
                    return reply
        except queue.Empty:
            raise Disconnected(f"no answer in {timeout_s:g} s") from None

    def close(self) -> None:
        if self._client is not None:
            self._endpoint.leave(self._client)
            self._client = None

"""The clients of `bench_http.py` and `bench_scrapes.py`, in processes of their own.

They read as little as tells tokens and times, so that what they take of the machine is small
beside the server: bytes are kept as they come, and parsed when the round is over.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_END = b"0\r\n\r\n"
"""The last part of a reply in chunks."""
_SCRAPE_S = 0.05
"""The time between two questions of llm-d's endpoint picker."""


@dataclass(frozen=True)
class Heard:
    """The replies of one round.

    Attributes:
        seconds: from the first request to the end of the last reply.
        first_s: times from a request to the first text of its reply, seconds.
        texts: the text of each reply.
        events: the server-sent events of all replies.
    """

    seconds: float
    first_s: list[float]
    texts: list[str]
    events: int


class StreamConnection(asyncio.Protocol):
    """A connection with one request, whose reply is kept as it comes."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.first: float | None = None
        self.transport: asyncio.Transport
        self.done: asyncio.Future[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.first is None and b"data: " in self.received:
            self.first = time.perf_counter()
        if self.received.endswith(_END) or (
            self.first is None and b"HTTP/1.1 200" not in self.received
        ):
            self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Wake who waits for the reply."""
        if not self.done.done():
            self.done.set_result(None)

    async def ask(self, request: bytes) -> float:
        """Send a request and wait for its reply; returns the time to the first event, seconds."""
        self.received, self.first = bytearray(), None
        self.done = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self.transport.write(request)
        await self.done
        if self.first is None:
            raise SystemExit(f"error: the server answered {bytes(self.received[:600])!r}")
        return self.first - sent


def client(pipe: Connection, port: int, key: str) -> None:
    """Ask what comes over the pipe, and answer what was heard, until None comes."""
    pipe.send("ready")
    while (bodies := pipe.recv()) is not None:
        pipe.send(asyncio.run(_round(port, [_request(body, port, key) for body in bodies])))


async def _round(port: int, requests: Sequence[bytes]) -> Heard:
    """Send all requests at once, each over a connection of its own that is there already."""
    loop = asyncio.get_running_loop()
    opened = [
        (await loop.create_connection(StreamConnection, "127.0.0.1", port))[1] for _ in requests
    ]
    began = time.perf_counter()
    asked = zip(opened, requests, strict=True)
    first_s = await asyncio.gather(*(one.ask(request) for one, request in asked))
    seconds = time.perf_counter() - began
    for one in opened:
        one.transport.close()
    replies = [_events(bytes(one.received)) for one in opened]
    texts = ["".join(c["text"] for e in reply for c in e["choices"]) for reply in replies]
    return Heard(seconds, list(first_s), texts, sum(map(len, replies)))


class StepTimes(StreamConnection):
    """A connection that notes when its reply's parts came.

    Attributes:
        parts: their times, of the monotonic clock, and how much of the reply was there then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[float, int]] = []

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.parts.append((time.perf_counter(), len(self.received)))


def arrivals(pipe: Connection, port: int, key: str) -> None:
    """Ask what comes over the pipe, and answer when steps' tokens came, until None comes."""
    pipe.send("ready")
    while (bodies := pipe.recv()) is not None:
        pipe.send(asyncio.run(_steps(port, [_request(body, port, key) for body in bodies])))


async def _steps(port: int, requests: Sequence[bytes]) -> list[tuple[float, int]]:
    """Send all requests; returns times, and how many events of the first reply had come then."""
    loop = asyncio.get_running_loop()
    first, *others = [
        (await loop.create_connection(made, "127.0.0.1", port))[1]
        for made in (StepTimes, *[StreamConnection] * (len(requests) - 1))
    ]
    asked = zip([first, *others], requests, strict=True)
    await asyncio.gather(*(one.ask(request) for one, request in asked))
    for one in (first, *others):
        one.transport.close()
    found, start, count = [], 0, 0
    assert isinstance(first, StepTimes)
    for time_s, end in first.parts:
        count += first.received.count(b"data: {", start, end)
        found.append((time_s, count))
        start = end
    return found


def _request(body: dict[str, Any], port: int, key: str) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _events(reply: bytes) -> list[dict[str, Any]]:
    """Return the events of a reply that came in chunks."""
    _, _, rest = reply.partition(b"\r\n\r\n")
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    lines = (part.removeprefix(b"data: ") for part in bytes(body).split(b"\n\n") if part)
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def scraper(pipe: Connection, port: int, key: str) -> None:
    """Ask for /metrics every 50 ms from "begin" to "end", and say how often; until None comes."""
    pipe.send("ready")
    while pipe.recv() is not None:
        count, due = 0, time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while not pipe.poll(max(0.0, due - time.perf_counter())):
                due += _SCRAPE_S
                connection.sendall(_scrape(port, key))
                _read_page(connection)
                count += 1
        pipe.recv()
        pipe.send(count)


def _scrape(port: int, key: str) -> bytes:
    head = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n\r\n"
    return head.encode()


def _read_page(connection: socket.socket) -> None:
    """Read a reply to its end."""
    head, end, page = b"", b"", b""
    while not end:
        head += connection.recv(2**18)
        head, end, page = head.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if not head.startswith(b"HTTP/1.1 200 ") or length is None:
        raise SystemExit(f"error: /metrics answered {head!r}")
    left = int(length[1]) - len(page)
    while left:
        left -= len(connection.recv(min(left, 2**18)))

"""A server in a process of its own, which signals reach, and clients that load it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import httpx2

from tests.support import serving

LONG = {"model": serving.MODEL, "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}
WIDE = {**LONG, "n": 64, "stream": True}


@dataclass
class Running:
    """A process that serves, and its address."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=serving.HEADERS, timeout=60)

    def status(self) -> Any:
        """What GET /status tells."""
        with self.client() as client:
            return client.get("/status").json()

    def text(self, model: str = serving.MODEL) -> str:
        """A greedy continuation."""
        body = {**LONG, "model": model, "temperature": 0, "max_tokens": 20}
        with self.client() as client:
            return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


@contextmanager
def running(*options: str, port: str = "0") -> Iterator[Running]:
    """`pcg serve` with the small model."""
    serve = ["-m", "pcg_cli", "serve", str(serving.model_directory()), "--port", port]
    given = ["--api-key", serving.KEY, "--served-model-name", serving.MODEL]
    with started([*serve, *given, "--kv-cache-gib", "0.1", *options]) as process:
        yield process


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[Running]:
    """A Python program that serves, and says where; it is killed in the end."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, *arguments], stderr=said, text=True)
        try:
            yield Running(process, _address(process, said))
        finally:
            process.kill()
            process.wait(30)


def _address(process: subprocess.Popen[str], said: IO[str]) -> str:
    """Where a server listens, once it says so."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        said.seek(0)
        text = said.read()
        found = re.search(r"^listening at (\S+)$", text, re.MULTILINE)
        if found:
            return found[1]
        assert process.poll() is None, text
        time.sleep(0.05)
    raise AssertionError(text)


@dataclass
class Load:
    """Streams that were begun, each on a thread, and their lines."""

    lines: list[list[str]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, server: Running, count: int, **fields: Any) -> None:
        """Begin so many streams, and wait for the first line of each."""
        for _ in range(count):
            lines: list[str] = []
            has_begun = threading.Event()
            body = {**WIDE, **fields}
            thread = threading.Thread(target=self._read, args=(server, body, lines, has_begun))
            thread.start()
            self.lines.append(lines)
            self.threads.append(thread)
            assert has_begun.wait(30)

    @staticmethod
    def _read(
        server: Running, body: dict[str, Any], lines: list[str], has_begun: threading.Event
    ) -> None:
        try:
            with (
                server.client() as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                for line in reply.iter_lines():
                    lines.append(line)
                    has_begun.set()
        except httpx2.TransportError as error:
            lines.append(f"broken: {type(error).__name__}")

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)

    def assert_whole(self) -> None:
        """Every stream came to its end, with all its choices."""
        for lines in self.lines:
            assert lines[-2:] == ["data: [DONE]", ""]
            assert sum('"finish_reason":"length"' in line for line in lines) == WIDE["n"]

"""A server in a process of its own, which signals reach, and clients that load it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx2

from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from tests.support import serving
from tests.support.waiting import until

LONG = {"model": serving.MODEL, "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}
WIDE = {**LONG, "n": 64, "stream": True}


@dataclass
class Running:
    """A process that serves, at the head of its own group, its address and standard error."""

    process: subprocess.Popen[str]
    url: str
    said: IO[str]

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    @property
    def engine_pids(self) -> list[int]:
        """The process of its engine; none where that runs in the server's own."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(one) for one in children if is_engine(int(one))]

    def errors(self) -> str:
        """What it has said on its standard error."""
        self.said.seek(0)
        return self.said.read()

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


def is_engine(pid: int) -> bool:
    """Whether a process is an engine's that has not ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"spawn_main" in command


def load_broken() -> Executor:
    """Load the small model, in a process whose engine ends by an error at its first step."""

    def fail(_: AsyncEngine) -> None:
        raise RuntimeError("broken on purpose")

    AsyncEngine._step = fail  # type: ignore[method-assign]
    return serving.make_executor()


@contextmanager
def running(
    *options: str, port: str = "0", preexec_fn: Callable[[], None] | None = None
) -> Iterator[Running]:
    """`pcg serve` with the small model; `preexec_fn` is subprocess's."""
    serve = ["-m", "pcg_cli", "serve", str(serving.model_directory()), "--port", port]
    given = ["--api-key", serving.KEY, "--served-model-name", serving.MODEL]
    with started([*serve, *given, "--kv-cache-gib", "0.1", *options], preexec_fn) as process:
        yield process


@contextmanager
def started(
    arguments: Sequence[str], preexec_fn: Callable[[], None] | None = None
) -> Iterator[Running]:
    """A Python program that serves, and says where; it is killed in the end."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stderr=said,
            text=True,
            start_new_session=True,
            preexec_fn=preexec_fn,
        )
        try:
            server = Running(process, _address(process, said), said)
            engines = server.engine_pids
            yield server
            process.kill()
            until(lambda: not any(map(is_engine, engines)))  # none outlives its server
        finally:
            process.kill()
            process.wait(60)


def _address(process: subprocess.Popen[str], said: IO[str]) -> str:
    """Where a server listens, once it says so."""
    end = time.monotonic() + 240
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
            assert has_begun.wait(60)

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

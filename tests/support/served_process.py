"""`pcg serve` as a process of its own, with the engine's process that it starts, and load on it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx2

from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from tests.support import serving
from tests.support.waiting import until

LONG = {"model": serving.MODEL, "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}
WIDE = {**LONG, "n": 64, "stream": True}


@dataclass
class Running:
    """A process that serves, its address and its standard error."""

    process: subprocess.Popen[str]
    url: str
    said: IO[str]

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=serving.HEADERS, timeout=60)

    @property
    def engine_pid(self) -> int:
        """The process of its engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (found,) = [int(pid) for pid in children.read_text().split() if is_engine(int(pid))]
        return found

    def errors(self) -> str:
        """What it has said on its standard error."""
        self.said.seek(0)
        return self.said.read()


def is_engine(pid: int) -> bool:
    """Whether a process is an engine's that has not ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"spawn_main" in command


def load_broken() -> Executor:
    """Load the small model, in a process whose engine ends by an error after its first step."""

    def fail(_: AsyncEngine) -> None:
        raise RuntimeError("broken on purpose")

    AsyncEngine._settle = fail  # type: ignore[method-assign]
    return serving.make_executor()


@contextmanager
def running(*options: str, port: str = "0", model: Path | None = None) -> Iterator[Running]:
    """A server of the small model, at the head of its own process group."""
    where = str(model or serving.model_directory())
    given = ["--port", port, "--api-key", serving.KEY, "--kv-cache-gib", "0.1", *options]
    given += ["--served-model-name", serving.MODEL]
    command = [sys.executable, "-m", "pcg_cli", "serve", where, *given]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stderr=said, text=True, start_new_session=True)
        try:
            server = Running(process, address(process, said), said)
            engine = server.engine_pid
            yield server
            process.kill()
            until(lambda: not is_engine(engine))  # it never outlives the server
        finally:
            process.kill()
            process.wait(30)


def address(process: subprocess.Popen[str], said: IO[str]) -> str:
    """Where a server listens, once it says so."""
    found: list[str] = []

    def is_there() -> bool:
        said.seek(0)
        text = said.read()
        found[:] = re.findall(r"^listening at (\S+)$", text, re.MULTILINE)
        assert process.poll() is None, text
        return bool(found)

    until(is_there)
    return found[0]


@dataclass
class Load:
    """Streams that were begun, each on a thread, and their lines."""

    lines: list[list[str]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, server: Running, count: int) -> None:
        """Begin so many streams, and wait for the first line of each."""
        for _ in range(count):
            lines: list[str] = []
            has_begun = threading.Event()
            thread = threading.Thread(target=self._read, args=(server, lines, has_begun))
            thread.start()
            self.lines.append(lines)
            self.threads.append(thread)
            assert has_begun.wait(30)

    @staticmethod
    def _read(server: Running, lines: list[str], has_begun: threading.Event) -> None:
        try:
            with (
                server.client() as client,
                client.stream("POST", "/v1/completions", json=WIDE) as reply,
            ):
                for line in reply.iter_lines():
                    lines.append(line)
                    has_begun.set()
        except httpx2.TransportError as error:
            lines.append(f"broken: {type(error).__name__}")

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)

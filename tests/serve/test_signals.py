"""`pcg serve` as a process: signals under load, and a start after a kill."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import httpx2
import pytest

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


@contextmanager
def running(*options: str, port: str = "0") -> Iterator[Running]:
    command = [sys.executable, "-m", "pcg_cli", "serve", str(serving.model_directory())]
    given = ["--port", port, "--api-key", serving.KEY, "--kv-cache-gib", "0.1", *options]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, *given], stderr=said, text=True)
        try:
            yield Running(process, address(process, said))
        finally:
            process.kill()
            process.wait(30)


def address(process: subprocess.Popen[str], said: IO[str]) -> str:
    """Where a server listens, once it says so."""
    end = time.monotonic() + 60
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


def text_of(server: Running) -> Any:
    with server.client() as client:
        body = {**LONG, "temperature": 0, "max_tokens": 20}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_sigterm_under_load_loses_nothing_that_was_begun() -> None:
    with running("--served-model-name", serving.MODEL) as server:
        load = Load()
        load.begin(server, 2)
        server.process.send_signal(signal.SIGTERM)
        with server.client() as client:
            refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        load.join()
        assert server.process.wait(30) == 0
    for lines in load.lines:
        assert lines[-2:] == ["data: [DONE]", ""]
        assert sum('"finish_reason":"length"' in line for line in lines) == 64


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    with running("--served-model-name", serving.MODEL) as server:
        load = Load()
        load.begin(server, 4)
        server.process.send_signal(signal.SIGINT)
        with server.client() as client:
            assert client.get("/health").status_code == 503
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 1
        load.join()


@pytest.mark.slow
def test_a_kill_under_load_and_a_start_at_the_same_port() -> None:
    with running("--served-model-name", serving.MODEL) as server:
        expected = text_of(server)
        load = Load()
        load.begin(server, 2)
        server.process.kill()
        load.join()
        assert all("data: [DONE]" not in lines for lines in load.lines)
        with running("--served-model-name", serving.MODEL, port=server.port) as again:
            assert text_of(again) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--api-key", "short"], "at least 8"),
        (["--host", "no such host."], "is no address"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--api-keys", "none.json"], "none.json"),
        (["--tp", "2"], "--tp"),
        (["--ssl-certfile", "none.pem"], "none.pem"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], text: str) -> None:
    command = [sys.executable, "-m", "pcg_cli", "serve", str(serving.model_directory())]
    done = subprocess.run(
        [*command, "--port", "0", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (1, 2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr

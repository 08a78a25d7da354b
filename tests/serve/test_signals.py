"""`pcg serve` as a process: signals under load, and a start after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support import serving
from tests.support.served_process import LONG, Load, Running, running


def text_of(server: Running) -> Any:
    with server.client() as client:
        body = {**LONG, "temperature": 0, "max_tokens": 20}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_sigterm_under_load_loses_nothing_that_was_begun() -> None:
    with running() as server:
        load = Load()
        load.begin(server, 2)
        os.killpg(server.process.pid, signal.SIGTERM)  # all processes, as a service manager does
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
    with running() as server:
        load = Load()
        load.begin(server, 4)
        os.killpg(server.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        with server.client() as client:
            assert client.get("/health").status_code == 503
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(10) == 1
        load.join()


@pytest.mark.slow
def test_a_kill_under_load_and_a_start_at_the_same_port() -> None:
    with running() as server:
        expected = text_of(server)
        load = Load()
        load.begin(server, 2)
        server.process.kill()
        load.join()
        assert all("data: [DONE]" not in lines for lines in load.lines)
        with running(port=server.port) as again:
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

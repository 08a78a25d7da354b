"""`pcg serve` as a process: signals under load, and a start after a kill."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import httpx2
import pytest

from tests.support import serving
from tests.support.server_process import LONG, Load, Running, running
from tests.support.waiting import until


def test_sigterm_under_load_loses_nothing_that_was_begun() -> None:
    with running() as server:
        load = Load()
        load.begin(server, 2)
        os.killpg(server.process.pid, signal.SIGHUP)  # all processes, as a service manager does
        until(lambda: "reloaded\nAPI keys: 1 key" in server.errors())
        with held(server) as client:
            os.killpg(server.process.pid, signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503)
            refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        load.join()
        assert server.process.wait(60) == 0
    load.assert_whole()


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_drains_but_under_nohup(ignored: bool) -> None:
    """It tells the shell alone, as that does its jobs."""
    terminal, other = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(other, termios.TIOCSCTTY, 0)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with running(preexec_fn=take_terminal) as server:
        os.close(other)
        load = Load()
        load.begin(server, 2)
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: "reloaded" in server.errors())
        with nullcontext(server.client()) if ignored else held(server) as client:
            os.close(terminal)
            os.killpg(server.process.pid, signal.SIGHUP)
            if ignored:
                until(lambda: server.errors().count("reloaded") > 1)
            else:
                until(lambda: client.get("/health").status_code == 503)
        load.join()
        if not ignored:
            assert server.process.wait(60) == 0
    load.assert_whole()


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    with running() as server:
        load = Load()
        load.begin(server, 4)
        with held(server) as client:
            os.killpg(server.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
            until(lambda: client.get("/health").status_code == 503)
            os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(60) == 1
        load.join()


@pytest.mark.slow
def test_a_kill_under_load_and_a_start_at_the_same_port(tmp_path: Path) -> None:
    """The models are there again with their texts and versions, and every page is free."""
    serving.make_executor().save_adapter("lora-0", tmp_path / "lora")
    module = ["--lora-modules", f"mine={tmp_path / 'lora'}"]
    with running(*module) as server:
        before = served(server)
        load = Load()
        load.begin(server, 2)
        load.begin(server, 1, model="mine")
        with held(server):
            server.process.kill()
        load.join()
        assert "data: [DONE]" not in load.lines[-1]
        with running(*module, port=server.port) as again:
            assert served(again) == before
            until(lambda: free_pages(again) == before["free_pages"])


@contextmanager
def held(server: Running) -> Iterator[httpx2.Client]:
    """A client of a server whose engine stands still meanwhile."""
    (engine,) = server.engine_pids
    os.kill(engine, signal.SIGSTOP)
    try:
        with server.client() as client:
            yield client
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


def served(server: Running) -> dict[str, object]:
    """What the server serves: texts, versions with digests, and its pages."""
    status = server.status()
    assert status["engine"]["free_pages"] == status["engine"]["pages"]
    found = {name: server.text(name) for name in (serving.MODEL, "mine")}
    assert found["mine"] != found[serving.MODEL]
    versions = [(one["name"], one["version"], one["digest"]) for one in status["adapters"]]
    return {**found, "versions": versions, "free_pages": status["engine"]["free_pages"]}


def free_pages(server: Running) -> int:
    return int(server.status()["engine"]["free_pages"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--api-key", "short"], "at least 8"),
        (["--host", "no such host."], "is not an address"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--api-keys", "none.json"], "none.json"),
        (["--tp", "2"], "--tp"),
        (["--ssl-certfile", "none.pem"], "none.pem"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], text: str) -> None:
    command = [sys.executable, "-m", "pcg_cli", "serve", str(serving.model_directory())]
    done = subprocess.run(
        [*command, "--port", "0", *options], capture_output=True, text=True, timeout=200
    )
    assert done.returncode in (1, 2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr

"""A server in a process of its own, by the command that users run, and clients in theirs.

`make test-clients` installs each client into a virtual environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pcg.runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
CHECKPOINT = ROOT / "examples" / "checkpoint"
ADAPTERS = ROOT / "examples" / "adapters"
BASE, KEY = "base", "a-key-of-the-tests"
LORA = "typed"
"""An adapter that ships."""
PROMPT, TEXTS = "def copy_file(path, recursive=True):", ["def main():", "class Error:"]
"""What clients ask for."""
_ADDRESS = re.compile(r"listening at (http://\S+)")
_START_S, _END_S = 300, 60


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@contextlib.contextmanager
def served(
    log: Path, adapters: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Served]:
    """Serve the model that ships by `pcg serve`; SIGTERM ends it, and it must end well.

    Args:
        log: the file of what it prints.
        adapters: names of the adapters that ship.
    """
    modules = [f"--lora-modules={name}={ADAPTERS / name}" for name in adapters]
    named = ["--served-model-name", BASE, "--api-key", KEY, "--port", "0", "--dtype", "float32"]
    command = [sys.executable, "-m", "pcg_cli", "serve", str(CHECKPOINT), *named]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *modules, *options], stdout=file, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield Served(_address(process, log), process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == 0, log.read_text()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        found = _ADDRESS.search(log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def client_program(environment: str, program: str) -> str:
    """Return the path of a client's program; skips the test where it is not installed."""
    path = ROOT / ".venv-clients" / environment / "bin" / program
    if not path.exists():
        pytest.skip(f"{environment} is not installed; make test-clients installs it")
    return str(path)


def calls_of(
    environment: str, script: str, home: Path, server: Served, *, models: Sequence[str], **more: str
) -> Any:
    """Run a script of tests/clients in a client's environment; returns the JSON that it prints.

    Args:
        models: the names of models that it asks.
        more: further environment variables of it.
    """
    printed = run_client(
        [client_program(environment, "python"), str(ROOT / "tests" / "clients" / script)],
        home,
        PCG_URL=server.openai_url,
        PCG_MODELS=",".join(models),
        OPENAI_API_KEY=KEY,
        **more,
    )
    return json.loads(printed.splitlines()[-1])


def spaces_of(tokenizer: Tokenizer) -> list[int]:
    """Tokens of white space, which the JSON of a small model could go on with for ever."""
    return [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).isspace()]


def run_client(
    command: Sequence[str], home: Path, *, timeout_s: float = 600, **variables: str
) -> str:
    """Run a client to its end; returns what it prints, on both outputs.

    Args:
        home: its home directory, where caches go.
        variables: further environment variables.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        command,
        env=environment,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout

"""Servers that begin soon, for `soak_kills.py`: processes that are copies of one that has all.

    python benchmarks/kills_server.py MODEL

Importing takes a process of `pcg serve` far longer than all that it does then. So this program
imports everything and loads the model, once; for each line of its input it makes a copy of itself,
which is the server's process, and that one makes a further copy for its engine. From there on both
do what `pcg serve` does: `pcg.serve.server.serve` with `pcg.serve.engine.process.process_client`.
A line is JSON: the file for what the server prints, and options of `ServeOptions`. The
answer is the pid of the server.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

START_S = 300.0
"""The longest time in which a server begins, seconds."""


class Life:
    """A server from its start to its end.

    Attributes:
        pid: the number of its process.
        log: the file of what it prints.
    """

    def __init__(self, pid: int, log: Path, own: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.log = log
        self._own = own

    def address(self) -> str | None:
        """Return where it listens, once it says so; None until then."""
        found = re.search(r"^listening at (\S+)$", self.log.read_text(), re.MULTILINE)
        return None if found is None else found[1]

    def wait(self) -> str:
        """Return where it listens, once it does. SystemExit: it ended before."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.is_alive():
            found = self.address()
            if found is not None:
                return found
            time.sleep(0.005)
        raise SystemExit(f"error: the server did not begin\n{self.log.read_text()}")

    def engines(self) -> list[int]:
        """Return the process of its engine, or none."""
        try:
            found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return []
        return [int(one) for one in found]

    def is_alive(self) -> bool:
        """Return whether it runs."""
        if self._own is not None:
            return self._own.poll() is None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    def kill(self, *, engine: bool = False) -> None:
        """Kill its process, or that of its engine alone, and wait until both are gone."""
        engines = self.engines()
        for pid in engines if engine and engines else [self.pid]:
            os.kill(pid, signal.SIGKILL)
        self.join(engines)

    def end(self) -> None:
        """Have it end in order, and wait until it has."""
        engines = self.engines()
        os.kill(self.pid, signal.SIGTERM)
        self.join(engines)

    def join(self, engines: Sequence[int]) -> None:
        """Wait until it has ended, and the processes of its engine."""
        until = time.monotonic() + 120
        while self.is_alive() or any(Path(f"/proc/{one}").exists() for one in engines):
            if time.monotonic() > until:
                raise SystemExit(f"error: process {self.pid} does not end")
            time.sleep(0.002)


class Servers:
    """Begins servers of one model and folder, as copies or by the command.

    Args:
        folder: is for logs.
        options: of `ServeOptions`.
    """

    def __init__(self, model: Path, folder: Path, options: Mapping[str, Any]) -> None:
        self._model = model
        self._folder = folder
        self._options = options
        self._count = 0
        self._origin = subprocess.Popen(
            [sys.executable, __file__, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read()

    def begin(self, *, by_command: bool = False) -> Life:
        """Begin a server."""
        self._count += 1
        kept = Path(self._options["data_dir"]).name
        log = self._folder / f"{kept}-{self._count:03d}.log"
        log.touch()
        if by_command:
            return self._by_command(log)
        assert self._origin.stdin is not None
        line = json.dumps({"log": str(log), "options": self._options})
        self._origin.stdin.write(line.encode() + b"\n")
        self._origin.stdin.flush()
        return Life(int(self._read()), log)

    def _by_command(self, log: Path) -> Life:
        given = ["--port", "0", "--dtype", "float32"]
        for name, value in self._options.items():
            for one in value if isinstance(value, list) else [value]:
                given += [f"--{name.replace('_', '-')}", str(one)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pcg_cli", "serve", str(self._model), *given],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Life(process.pid, log, process)

    def _read(self) -> str:
        assert self._origin.stdout is not None
        line = self._origin.stdout.readline()
        if not line:
            raise SystemExit("error: the process that servers are copies of has ended")
        return line.decode().strip()

    def close(self) -> None:
        """End the process that servers are copies of."""
        assert self._origin.stdin is not None
        self._origin.stdin.close()
        self._origin.wait(60)


def serve_copy(executor: Any, log: str, given: Mapping[str, Any]) -> bool:
    """Serve, in a process that is a copy."""
    from pcg.parent_process import end_with_parent
    from pcg.serve.engine import process
    from pcg.serve.engine.options import ServeOptions
    from pcg.serve.server import serve

    end_with_parent(os.getppid())
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    process.get_context = lambda _: multiprocessing.get_context("fork")  # type: ignore[assignment]
    several = {name: tuple(one) for name, one in given.items() if isinstance(one, list)}
    options = ServeOptions(**{**given, **several, "port": 0, "data_dir": Path(given["data_dir"])})

    def say(text: str) -> None:
        print(text, flush=True)

    return serve(options, partial(process.process_client, lambda: executor), say)


def main(model: str) -> None:
    """Make a copy for each line."""
    import torch
    import uvicorn.loops.auto
    import uvicorn.protocols.http.h11_impl  # noqa: F401

    import pcg
    import pcg.serve.engine.process
    import pcg.serve.server

    torch.set_num_threads(1)
    executor = pcg.compile(model, dtype="float32")
    assert executor.tokenizer is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        is_well = False
        try:
            is_well = serve_copy(executor, asked["log"], asked["options"])
        finally:
            os._exit(0 if is_well else 1)


if __name__ == "__main__":
    main(sys.argv[1])

"""A base executor for tests: on a thread of this process, or in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from pcg.runtime.executor import Executor
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.connect import SplitExecutor, connect
from tests.support import serving
from tests.support.in_process import InProcessEndpoint
from tests.support.waiting import until

KEY = "key-of-the-base"


@dataclass
class Base:
    """A base on a thread."""

    loop: BaseLoop
    endpoint: InProcessEndpoint

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights, without copies that the undivided executor packs."""
        sizes = {**self.loop.base.multiplied, **self.loop.base.fetched}
        return sum(tensor.nbytes for tensor in sizes.values())

    def connect(self, **options: Any) -> SplitExecutor:
        """A client of it."""
        return connect(self.endpoint.transport(), api_key=KEY, **options)


def make_base(executor: Executor, **options: Any) -> Base:
    """A base whose loop nobody runs yet, by the weights of an undivided executor."""
    endpoint = InProcessEndpoint()
    given = BaseOptions(api_key=(KEY,), **options)
    return Base(BaseLoop(BaseExecutor(executor), endpoint, given), endpoint)


@contextmanager
def running_base(executor: Executor, **options: Any) -> Iterator[Base]:
    """A base that runs."""
    base = make_base(executor, **options)
    thread = threading.Thread(target=base.loop.run)
    thread.start()
    try:
        yield base
    finally:
        base.loop.stop()
        thread.join(60)


@dataclass
class BaseProcess:
    """A process that serves the small model's base, and its address."""

    process: subprocess.Popen[bytes]
    where: str
    said: IO[str]

    def errors(self) -> str:
        """What it has said on its standard error."""
        self.said.seek(0)
        return self.said.read()


@contextmanager
def base_process(port: str = "0", *options: str) -> Iterator[BaseProcess]:
    """`pcg serve-base` with the small model; it is killed in the end."""
    model = str(serving.model_directory())
    command = [sys.executable, "-m", "pcg_cli", "serve-base", model, "--port", port]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, "--api-key", KEY, *options], stderr=said)
        base = BaseProcess(process, "", said)
        try:
            until(lambda: _address(base) is not None, 240)
            base.where = str(_address(base))
            yield base
        finally:
            process.kill()
            process.wait(30)


def _address(base: BaseProcess) -> str | None:
    text = base.errors()
    assert base.process.poll() is None, text
    found = re.search(r"^listening at (\S+)$", text, re.MULTILINE)
    return None if found is None else found[1]

"""A process that ends, or forks, while an engine runs in it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from pcg.errors import EngineError
from tests.support.small_engine import make_executor

executor = make_executor()
engine = executor.engine().start()
engine.submit([1, 2, 3], max_new_tokens=100, ignore_eos=True)
child = os.fork()
if not child:
    asked = (lambda: executor.generate([[1, 2]], max_new_tokens=2), lambda: engine.submit([1]))
    for ask in asked:
        try:
            ask()
        except EngineError as error:
            print(error, flush=True)
    engine.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(3)
"""


def test_neither_aborts_nor_hangs() -> None:
    """A thread within a kernel would abort its process; in a fork, nobody answers."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr
    assert "terminate" not in done.stderr
    *refused, child = done.stdout.splitlines()
    assert child == "7"
    assert len(refused) == 2
    assert all("is a fork; make one here" in line for line in refused)

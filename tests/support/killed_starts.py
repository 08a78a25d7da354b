"""Starts of a store that are killed after 3, 6, 9 … lines of its code, until a start ends.

    python -m tests.support.killed_starts FOLDER        prints the number of killed starts

A process of its own, as a process with threads should not fork.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from pcg.serve.store.store import open_store

STEP = 3


def is_killed(folder: Path, lines: int) -> bool:
    """Start in a child that is killed after so many lines; False if the start ends before."""
    child = os.fork()
    if not child:
        left = lines

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if "/pcg/serve/store/" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            open_store(folder).__enter__()
        except BaseException as error:
            print(f"after {lines} lines: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(1)
    return os.WIFSIGNALED(status)


def main() -> None:
    folder, killed = Path(sys.argv[1]), 0
    while is_killed(folder, STEP * (killed + 1)):
        killed += 1
    print(killed)


if __name__ == "__main__":
    main()

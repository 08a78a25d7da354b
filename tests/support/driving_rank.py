"""A rank of an engine on threads: `python driving_rank.py WHAT DEGREE`, as torchrun starts it."""

from __future__ import annotations

import sys
from typing import Any

from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from tests.support.ranked import SEQUENCES, make_executor, make_program

DEGREE = 2


def say(text: str) -> None:
    print(text, flush=True)


def idle(executor: Executor, running: AsyncEngine) -> None:
    """Serve one request, then wait for nothing until the engine ends."""
    running.submit(SEQUENCES[0], max_new_tokens=2, ignore_eos=True).wait(60)
    say("ready")
    say(f"ended: {running.join()}")


def busy(executor: Executor, running: AsyncEngine) -> None:
    """Serve request after request until one fails."""
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    for count in range(10**6):
        try:
            running.submit(SEQUENCES[1], "a", **options).wait(60)
        except Exception as error:
            say(f"ended: {error}")
            return
        if not count:
            say("ready")


def main(what: str, degree: int) -> None:
    executor = make_executor(make_program("llama3", degree), "llama3")
    with executor.engine(kv_cache_bytes=2**20).start() as running:
        if executor.ranks.rank == 0:
            {"idle": idle, "busy": busy}[what](executor, running)
        else:
            say("ready")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The python graders of a server's tenants, on threads that wait for sandboxes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakValueDictionary

from pcg.errors import GradingError
from pcg.graders.sample import Sample
from pcg.graders.sandbox_runner import check_sandbox, run_grader

_PROCESSES = 2
"""Sandboxes at once, one of a tenant's."""


class PythonGraders:
    """Runs the source of tenants' graders, one at a time of each tenant.

    Args:
        is_on: False where they are refused.
    Raises:
        UnsupportedError: they are switched on, and this machine has no sandbox.
    """

    def __init__(self, is_on: bool) -> None:
        if is_on:
            check_sandbox()
        self.is_on = is_on
        self._threads = ThreadPoolExecutor(_PROCESSES, "pcg graders")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, tenant: str, source: str, sample: Sample) -> float:
        """Run a source. GradingError: it fails, or none is run here.

        A job may have one from when the operator had switched them on.
        """
        if not self.is_on:
            said = "this server runs no python graders; its operator may switch them on"
            raise GradingError(said, "python_grader_server_error")
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Semaphore(1)
        await turn.acquire()
        try:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, run_grader, source, sample)
        except BaseException:
            turn.release()
            raise
        running.add_done_callback(partial(_end_turn, turn))
        return await asyncio.shield(running)  # whose process ends by itself, and its turn then

    def close(self) -> None:
        """End its threads, once what runs has ended."""
        self._threads.shutdown(cancel_futures=True)


def _end_turn(turn: asyncio.Semaphore, _: asyncio.Future[float]) -> None:
    turn.release()

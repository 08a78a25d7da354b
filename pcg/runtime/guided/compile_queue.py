"""The queue of guides to compile, one of each tenant in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pcg.errors import QueueFullError
from pcg.units import shown

_COMPILING = 2
"""Guides that are compiled at once."""
_MOST = 64
"""Guides of one tenant that wait or are compiled."""
_STACK_BYTES = 128 * 2**20
"""Of a thread that compiles: 32,768 characters can nest some 5,000 rules, and 8 MiB hold 1,000."""
_starting = threading.Lock()


class CompileQueue:
    """Runs functions on threads with room on their stacks, one of each tenant in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_COMPILING, "pcg guides")

    def submit(self, tenant: str, act: Callable[[], Any]) -> Future[Any]:
        """Have a function run; returns its result.

        QueueFullError: too many of a tenant with a name wait.
        """
        future: Future[Any] = Future()
        with self._lock:
            line = self._lines.setdefault(tenant, deque())
            if tenant and len(line) >= _MOST:
                raise QueueFullError(
                    f"{_MOST} guides of tenant {shown(tenant)} wait to be compiled, and as many "
                    "may; ask again later"
                )
            line.append((future, act))
        with _starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._threads.submit(self._run_next)
            finally:
                threading.stack_size(before)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant, line = self._lines.popitem(last=False)
            future, act = line.popleft()
            if line:
                self._lines[tenant] = line
        try:
            future.set_result(act())
        except BaseException as error:  # whoever waits for it gets it
            future.set_exception(error)

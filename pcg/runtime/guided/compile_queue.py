"""The queue of guides to compile: one of each tenant at a time, and in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pcg.errors import QueueFullError
from pcg.kernels.devices import device_pool
from pcg.units import shown

_COMPILING = 2
"""Guides that are compiled at once."""
_MOST = 64
"""Guides of one tenant that wait or are compiled."""
_STACK_BYTES = 128 * 2**20
"""Of a thread that compiles: 32,768 characters can nest some 5,000 rules, and 8 MiB hold 1,000."""
_starting = threading.Lock()


class CompileQueue:
    """Runs functions on threads with room on their stacks.

    Tenants take turns, and one with a name has one thread at most: a guide that takes long holds up
    those of its own tenant alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._busy: set[str] = set()
        self._threads = device_pool(None, _COMPILING, "pcg guides")

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
                self._threads.submit(self._run_all)
            finally:
                threading.stack_size(before)
        return future

    def _run_all(self) -> None:
        """Run what may run now; what waits behind its own tenant's is run by the thread of that."""
        tenant = None
        while True:
            with self._lock:
                if tenant is not None:
                    self._busy.discard(tenant)
                tenant = next((one for one in self._lines if one not in self._busy), None)
                if tenant is None:
                    return
                line = self._lines.pop(tenant)
                future, act = line.popleft()
                if line:
                    self._lines[tenant] = line
                if tenant:
                    self._busy.add(tenant)
            try:
                future.set_result(act())
            except BaseException as error:  # whoever waits for it gets it
                future.set_exception(error)

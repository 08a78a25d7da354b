"""The resolver: adapters under `--lora-roots`, loaded when a request first names them.

A name is one folder right under a root (`roots.py`). Requests that name it while it is loaded wait
for the one load; one that failed is tried again after a while, so that asking again costs nothing.
"""

from __future__ import annotations

import asyncio
import time

from pcg.errors import AdapterConflictError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.serve.adapters.loader import Loader, Origin, refusal
from pcg.serve.adapters.roots import Roots
from pcg.serve.errors import ApiError

_AGAIN_S = 5.0
"""Time after which an adapter that could not be loaded is tried again, seconds."""
_FAILED = 1024
"""Names whose failures are remembered."""


class Resolver:
    """Finds and loads the operator's adapters by their names; for one event loop."""

    def __init__(self, loader: Loader, roots: Roots) -> None:
        self._loader = loader
        self._roots = roots
        self._loading: dict[str, asyncio.Task[ServedAdapter | None]] = {}
        self._failed: dict[str, tuple[float, str]] = {}

    async def resolve(self, name: str, tenant: str) -> ServedAdapter | None:
        """Return the adapter of that name, for a tenant that asks; None if no root has one.

        Raises:
            ApiError: 400, it is there and cannot be loaded; 503, there is no room for it.
        """
        if not self._roots:
            return None
        until, message = self._failed.get(name, (0.0, ""))
        if time.monotonic() < until:
            raise refusal(message)
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, tenant))
            task.add_done_callback(lambda done: self._end(name, done))
        return await asyncio.shield(task)

    async def _load(self, name: str, tenant: str) -> ServedAdapter | None:
        directory = await asyncio.to_thread(self._roots.named, name)
        if directory is None:
            return None
        origin = Origin(name, int(time.time()), is_found=True)
        try:
            return await self._loader.load(name, directory, origin, tenant=tenant)
        except AdapterConflictError:  # somebody loaded it by hand meanwhile
            return self._loader.adapters.get(name)

    def _end(self, name: str, done: asyncio.Task[ServedAdapter | None]) -> None:
        del self._loading[name]
        error = None if done.cancelled() else done.exception()
        self._failed.pop(name, None)
        if isinstance(error, ApiError) and error.status_code == 400:
            if len(self._failed) == _FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[name] = time.monotonic() + _AGAIN_S, str(error.detail)

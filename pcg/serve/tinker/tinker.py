"""The state behind Tinker's protocol: sessions, futures, models and losses, and their expiry."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcg.serve.adapters.loader import Loader
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import LOG
from pcg.serve.store.store import Store
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.models import Models
from pcg.serve.tinker.records import FutureRecord
from pcg.serve.tinker.sessions import Losses, Sessions
from pcg.serve.tinker.wire import Promise

_SWEEP_S = 15.0
"""Time between two sweeps of expired objects, seconds."""
_SWEEPS = 240
"""Sweeps, about an hour, between two removals of old sessions."""


class Tinker:
    """The state behind the protocol; for a single event loop.

    Attributes:
        store: the rows and files.
        sessions: clients.
        futures: futures and their results.
        models: trained models.
        losses: custom losses.
    """

    def __init__(
        self, client: EngineClient, loader: Loader, store: Store, options: ServeOptions
    ) -> None:
        self.store = store
        self.sessions = Sessions(store, options.tinker_session_s)
        self.futures = Futures(store)
        self.models = Models(
            client, loader, store, self.futures, self.sessions, options=options, do=self.do
        )
        self.losses = Losses(store, self.futures, self.sessions)
        self._keep_s = options.keep_tinker_days * 24 * 3600
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Resume the work of an earlier run; the event loop must run."""
        self.do(self.losses.begin())
        self.do(self.models.begin())
        self.do(self._sweep())

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background and log its error."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("work of a Tinker client failed", exc_info=error)

    async def _forget(self) -> None:
        for folder in await self.sessions.forget(self._keep_s):
            await asyncio.to_thread(self.models.folders.remove, folder)

    async def _sweep(self) -> None:
        for sweep in itertools.count():
            if sweep % _SWEEPS == 0:
                await self._logged(self._forget)
            await asyncio.sleep(_SWEEP_S)
            for act in (self.sessions.expire, self.futures.expire, self.models.expire):
                await self._logged(act)

    async def _logged(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except Exception as error:  # a full disk may have room again
            LOG.error("expired objects cannot be removed", exc_info=error)


def promise_of(future: FutureRecord) -> Promise:
    """Return the reply to a request that became a future."""
    return Promise(request_id=future.id, **json.loads(future.answer))


# ------------------------------------------------------------------------------------------- links

LINKS = "/tinker/api/v1/external_files"
"""Path prefix of links."""
LIFE_S = 3600
"""Lifetime of a link, seconds."""
MOST_LINKS = 1024
"""The most links of a tenant; beyond it, the oldest is removed."""


@dataclass(frozen=True)
class Link:
    """An unguessable address of a tenant's file; it expires at `until_s` of `time.monotonic`."""

    tenant: str
    file: Path
    until_s: float


class Links:
    """Unguessable addresses of files, which need no key; for a single event loop.

    They end with the server.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._links: dict[str, Link] = {}
        self._paths: dict[str, deque[str]] = {}

    def make(self, tenant: str, file: Path) -> str:
        path = f"{self._prefix}/{secrets.token_urlsafe(32)}/{file.name}"
        paths = self._paths.setdefault(tenant, deque())
        while len(paths) >= MOST_LINKS:
            self._links.pop(paths.popleft(), None)
        paths.append(path)
        self._links[path] = Link(tenant, file, time.monotonic() + LIFE_S)
        return path

    def find(self, path: str) -> Link | None:
        """Return a valid link, or None."""
        link = self._links.get(path)
        if link is not None and time.monotonic() > link.until_s:
            del self._links[path]
            return None
        return link

    def owner(self, path: str) -> str | None:
        """Return the owner of a link's file; None if the path is not a link."""
        link = self.find(path)
        return None if link is None else link.tenant

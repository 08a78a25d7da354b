"""All that the routes of Tinker's protocol share: sessions, futures, and what they outlast."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pcg.serve.adapters.loader import Loader
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import LOG
from pcg.serve.store.store import Store
from pcg.serve.tinker.folders import Folders
from pcg.serve.tinker.future_records import FutureRecord
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.losses import Losses
from pcg.serve.tinker.models import Models
from pcg.serve.tinker.sessions import Sessions
from pcg.serve.tinker.wire import Promise

_SWEEP_S = 15.0
"""The time between two looks at what has expired."""
_SWEEPS = 240
"""The looks, an hour of them, between two at what ended long ago."""


class Tinker:
    """The state behind the protocol; for one event loop.

    Attributes:
        store: the rows and files.
        sessions: clients.
        futures: promised results.
        models: what is trained.
        losses: what clients train by, beside what is known.
    """

    def __init__(
        self, client: EngineClient, loader: Loader, store: Store, options: ServeOptions
    ) -> None:
        self.store = store
        self.sessions = Sessions(store.database, options.tinker_session_s)
        self.futures = Futures(store.database)
        folders = Folders(store)
        self.models = Models(client, loader, self.futures, self.sessions, folders, options, self.do)
        self.losses = Losses(self.futures, self.sessions)
        self._folders = folders
        self._keep_s = options.keep_tinker_days * 24 * 3600
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Go on with what is kept, once the event loop runs."""
        self.do(self.losses.begin())
        self.do(self.models.begin())
        self.do(self._sweep())

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the requests; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("work of a Tinker client failed", exc_info=error)

    async def _forget(self) -> None:
        """Remove the rows of sessions that ended long ago."""
        for folder in await self.sessions.forget(self._keep_s):
            await asyncio.to_thread(self._folders.remove, folder)

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
            LOG.error("what has expired cannot be removed", exc_info=error)


def promise_of(future: FutureRecord) -> Promise:
    """Return what the client is told of a future that it is promised."""
    return Promise(request_id=future.id, **json.loads(future.answer))

"""The sessions of clients: each beats, and one that does not is ended."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable

from pcg.serve.http.errors import ApiError
from pcg.serve.store.database import Database
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker import session_records
from pcg.serve.tinker.session_records import OPEN, SESSIONS, SessionRecord
from pcg.serve.tinker.wire import SessionBody

MOST_SESSIONS = 256
"""The most sessions of a tenant that are open."""
MOST_ENDED = 4096
"""The most sessions of a tenant that have ended and are kept."""
_EXPIRED = "expired"

OnEnd = Callable[[SessionRecord], Awaitable[None]]


class Sessions:
    """The sessions of all tenants; for one event loop.

    Attributes:
        on_end: are called with each session that ends, in turn.

    Args:
        life_s: the longest time between two beats of a session, seconds.
    """

    def __init__(self, database: Database, life_s: float) -> None:
        self.on_end: list[OnEnd] = []
        self._database = database
        self._life_s = life_s
        found = database.read(
            lambda connection: SESSIONS.select(connection, order="ORDER BY id", status=OPEN)
        ).result()
        # Nobody could beat while there was no server.
        self._open = {one.id: (one, time.monotonic()) for one in found}

    async def create(self, tenant: str, body: SessionBody) -> SessionRecord:
        """Open a session. ApiError: the tenant has too many."""
        metadata = None if body.user_metadata is None else json.dumps(body.user_metadata)
        record = SessionRecord(
            new_key("ses-"),
            tenant,
            now(),
            OPEN,
            json.dumps(body.tags),
            metadata,
            body.display_name,
            body.sdk_version,
        )

        def act(connection: sqlite3.Connection) -> None:
            count = SESSIONS.count(connection, tenant=tenant, status=OPEN)
            if count >= MOST_SESSIONS:
                raise ApiError(
                    429,
                    f"You have {count} open sessions; finish some, or wait until they expire.",
                    code="too_many_sessions",
                )
            SESSIONS.insert(connection, record)

        await asyncio.wrap_future(self._database.write(act))
        self._open[record.id] = record, time.monotonic()
        return record

    def beat(self, tenant: str, id: str) -> SessionRecord:
        """Note that a session lives, and return it.

        Raises:
            ApiError: 410, it has ended, or is none of the tenant's.
        """
        record = self.find(tenant, id)
        self._open[id] = record, time.monotonic()
        return record

    def find(self, tenant: str, id: str) -> SessionRecord:
        """Return a session that is open; errors as of `beat`."""
        record, _ = self._open.get(id, (None, 0.0))
        if record is None or record.tenant != tenant:
            raise ApiError(
                410, f"There is no open session {id[:128]}; create another one.", param="session_id"
            )
        return record

    def is_open(self, id: str) -> bool:
        """Return True if a session has not ended."""
        return id in self._open

    async def finish(self, tenant: str, id: str, status: str) -> None:
        """End a session; nothing happens if it has ended. ApiError: 404, the tenant has none."""

        def find(connection: sqlite3.Connection) -> SessionRecord | None:
            return SESSIONS.find(connection, id=id, tenant=tenant)

        record = await asyncio.wrap_future(self._database.read(find))
        if record is None:
            raise ApiError(404, f"There is no session {id[:128]}.", param="session_id")
        await self._end(record, status)

    async def expire(self) -> None:
        """End the sessions that have not said for too long that they live."""
        least_s = time.monotonic() - self._life_s
        for id in list(self._open):
            record, beat_s = self._open.get(id, (None, 0.0))  # as it is now: ends take their time
            if record is not None and beat_s < least_s:
                await self._end(record, _EXPIRED)

    async def forget(self, keep_s: float) -> list[str]:
        """Remove what ended so long ago; returns folders that nothing names any more."""
        before_s = time.time() - keep_s

        def act(connection: sqlite3.Connection) -> list[str]:
            return session_records.forget(connection, before_s, MOST_ENDED)

        return await asyncio.wrap_future(self._database.write(act, may_use_reserve=True))

    async def _end(self, record: SessionRecord, status: str) -> None:
        def act(connection: sqlite3.Connection) -> bool:
            return session_records.end(connection, record.id, status)

        write = self._database.write(act, may_use_reserve=True)
        is_first = await asyncio.wrap_future(write)
        self._open.pop(record.id, None)
        if is_first:
            for tell in self.on_end:
                await tell(record)

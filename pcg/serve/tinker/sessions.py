"""The sessions of clients, which send heartbeats, and their custom losses."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Awaitable, Callable

import msgspec

from pcg.runtime.training.loss_graph import LossGraph
from pcg.serve.http.errors import ApiError
from pcg.serve.store.store import Store
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.records import (
    JSON,
    LOSSES,
    OPEN,
    SESSIONS,
    FutureRecord,
    LossRecord,
    SessionRecord,
    forget_requests,
    forget_sessions,
    insert_loss,
)
from pcg.serve.tinker.wire import SessionBody

MOST_SESSIONS = 256
"""The most open sessions of a tenant."""
MOST_ENDED = 4096
"""The most ended sessions of a tenant that are kept."""

OnEnd = Callable[[SessionRecord], Awaitable[None]]


class Sessions:
    """The sessions of all tenants; for a single event loop.

    Attributes:
        on_end: callbacks that receive each ended session, in turn.

    Args:
        life_s: time without a heartbeat after which a session expires, seconds.
    """

    def __init__(self, store: Store, life_s: float) -> None:
        self.on_end: list[OnEnd] = []
        self._store = store
        self._life_s = life_s
        rows = store.database.read(lambda rows: SESSIONS.select(rows, status=OPEN)).result()
        # Clients could not send heartbeats while the server was down.
        self._open = {session.id: (session, time.monotonic()) for session in rows}

    async def create(self, tenant: str, body: SessionBody) -> SessionRecord:
        """Open a session. ApiError: the tenant has too many."""
        session = SessionRecord(
            id=new_key("ses-"),
            tenant=tenant,
            created_s=now(),
            status=OPEN,
            tags=json.dumps(body.tags),
            user_metadata=None if body.user_metadata is None else json.dumps(body.user_metadata),
            display_name=body.display_name,
            sdk_version=body.sdk_version,
        )

        def act(connection: sqlite3.Connection) -> None:
            count = SESSIONS.count(connection, tenant=tenant, status=OPEN)
            if count >= MOST_SESSIONS:
                raise ApiError(
                    429,
                    f"You have {count} open sessions; finish some, or wait until they expire.",
                    code="too_many_sessions",
                )
            SESSIONS.insert(connection, session)

        await self._store.write(act)
        self._open[session.id] = session, time.monotonic()
        return session

    def beat(self, tenant: str, id: str) -> SessionRecord:
        """Record a heartbeat and return the session; errors as of `find`."""
        session = self.find(tenant, id)
        self._open[id] = session, time.monotonic()
        return session

    def find(self, tenant: str, id: str) -> SessionRecord:
        """Return an open session. ApiError: 410, the session has ended or is not the tenant's."""
        session, _ = self._open.get(id, (None, 0.0))
        if session is None or session.tenant != tenant:
            raise ApiError(
                410, f"There is no open session {id[:128]}; create another one.", param="session_id"
            )
        return session

    def is_open(self, id: str) -> bool:
        return id in self._open

    async def finish(self, tenant: str, id: str, status: str) -> None:
        """End a session, if it is open. ApiError: 404, the tenant has no such session."""
        session = await self._store.read(SESSIONS.find, id=id, tenant=tenant)
        if session is None:
            raise ApiError(404, f"There is no session {id[:128]}.", param="session_id")
        await self._end(session, status)

    async def expire(self) -> None:
        """End the sessions without a recent heartbeat."""
        least_s = time.monotonic() - self._life_s
        for id in list(self._open):
            session, beat_s = self._open.get(id, (None, 0.0))  # may change during an await
            if session is not None and beat_s < least_s:
                await self._end(session, "expired")

    async def forget(self, keep_s: float) -> list[str]:
        """Remove sessions that ended `keep_s` ago. Return folders that no row names any more."""
        return await self._store.remove(forget_sessions, time.time() - keep_s, MOST_ENDED)

    async def _end(self, session: SessionRecord, status: str) -> None:
        ended = {"status": status, "ended_s": now()}
        count = await self._store.remove(SESSIONS.change, ended, id=session.id, status=OPEN)
        self._open.pop(session.id, None)
        if count:
            for callback in self.on_end:
                await callback(session)


# ---------------------------------------------------------------------------------- custom losses

CREATE_LOSS = "create_custom_loss"
MOST_BYTES = 2**16
"""Maximum size of a graph as JSON, bytes."""


class Losses:
    """The custom losses of all sessions: checked once, stored, and named by passes."""

    def __init__(self, store: Store, futures: Futures, sessions: Sessions) -> None:
        self._store = store
        self._futures = futures
        self._sessions = sessions

    async def begin(self) -> None:
        """Settle the pending futures of an earlier run of the server."""
        for future in await self._futures.pending(CREATE_LOSS):
            await self._settle(future)

    async def create(self, tenant: str, session: str, seq: int, graph: LossGraph) -> FutureRecord:
        """Store a loss of a session and return its future; a repeated number returns the first.

        Raises:
            ApiError: the session does not exist, or the graph is too large, or there are too many.
            FinetuneError: the graph is invalid; the message names the node and the reason.
        """
        self._sessions.find(tenant, session)
        graph.check()
        text = msgspec.json.encode(graph).decode()
        if len(text) > MOST_BYTES:
            raise ApiError(
                400, f"The loss has {len(text)} bytes; use at most {MOST_BYTES}.", param="graph"
            )
        loss = LossRecord(new_key("loss-"), tenant, session, seq, text, now())
        stream = f"{session}:losses"
        future, is_new = await self._futures.promise(
            tenant,
            session,
            stream,
            seq,
            CREATE_LOSS,
            b"",
            None,
            lambda rows: insert_loss(rows, loss),
        )
        if is_new:
            await self._settle(future)
        return future

    async def _settle(self, future: FutureRecord) -> None:
        stream, seq = future.stream, future.seq
        loss = await self._store.read(LOSSES.find, session=future.session, seq=seq)
        assert loss is not None  # written in the transaction of the future
        reply = json.dumps({"loss_id": loss.id, "type": CREATE_LOSS}).encode()
        await self._futures.resolve(
            future, reply, JSON, lambda rows: forget_requests(rows, stream, seq, seq)
        )

"""Futures: durable promises of results, and the clients that wait for them.

A future is stored before its client receives it, and a result before any client receives it. So
after a crash a settled future keeps its result, and a pending future is executed again by its
stream.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pcg.errors import PcgError, StoreFullError
from pcg.serve.http.errors import LOG, ApiError, as_api_error
from pcg.serve.store.store import Store
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker.records import (
    DONE,
    FAILED,
    FUTURES,
    PENDING,
    SERVER,
    USER,
    FutureRecord,
    settle,
    used_by_futures,
)

Also: TypeAlias = Callable[[sqlite3.Connection], None]
"""Writes further rows in the transaction of a future."""

MOST_PENDING = 8192
"""The most pending futures of a tenant."""
MOST_BYTES = 4 * 2**30
"""The most bytes of requests and results in the futures of a tenant."""
AGAIN_S = 5.0
"""Time between two attempts to write a result on a full disk, seconds."""
_KEPT_S = 24 * 3600
_COUNT_S = 300.0
"""Time between two counts of all rows, seconds; a count of a million takes two seconds."""


class Futures:
    """The futures of all tenants; for a single event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self.is_closing = False
        self._count(store.database.read(used_by_futures).result())

    def _count(self, used: Mapping[str, tuple[int, int]]) -> None:
        self._count_s = time.monotonic() + _COUNT_S
        self._counts = {tenant: count for tenant, (count, _) in used.items()}
        self._bytes = {tenant: size for tenant, (_, size) in used.items()}

    async def promise(
        self,
        tenant: str,
        session: str,
        stream: str,
        seq: int,
        kind: str,
        request: bytes,
        answer: Mapping[str, Any] | None = None,
        also: Also | None = None,
    ) -> tuple[FutureRecord, bool]:
        """Store a request. Return its future, and True if it is new.

        Args:
            stream, seq: position of the request; a repeated request of a position is the first.
            request: the data to execute the request, also after a crash.
            answer: fields of the reply besides `request_id`.
            also: writes further rows with a new future.
        Raises:
            ApiError: the tenant has too many futures, or the position has a request of another
                verb.
        """
        record = FutureRecord(
            new_key("req-"), tenant, session, stream, seq, kind, json.dumps(answer or {}), now(),
            request,
        )  # fmt: skip

        def act(connection: sqlite3.Connection) -> tuple[FutureRecord, bool]:
            first = FUTURES.find(connection, stream=stream, seq=seq)
            if first is not None:
                if first.kind != kind:
                    raise ApiError(
                        400,
                        f"The request {seq} is a {first.kind}, and this is a {kind}; number "
                        "requests one by one.",
                        param="seq_id",
                    )
                return first, False
            self._check(tenant, record.size_bytes)
            FUTURES.insert(connection, record)
            if also is not None:
                also(connection)
            return record, True

        future, is_new = await self._store.write(act)
        if is_new:
            self._counts[tenant] = self._counts.get(tenant, 0) + 1
            self._bytes[tenant] = self._bytes.get(tenant, 0) + future.size_bytes
        return future, is_new

    def _check(self, tenant: str, size_bytes: int) -> None:
        count, size = self._counts.get(tenant, 0), self._bytes.get(tenant, 0) + size_bytes
        if count >= MOST_PENDING:
            raise ApiError(
                429, f"{count} of your requests wait already; ask again later.", code="queue_full"
            )
        if size > MOST_BYTES:
            raise ApiError(
                429,
                f"Your requests and their results have {size} bytes; at most {MOST_BYTES} are "
                "allowed. Ask again later.",
                code="queue_full",
            )

    # ------------------------------------------------------------------------------- settling

    async def resolve(
        self, future: FutureRecord, result: bytes, media_type: str, also: Also | None = None
    ) -> None:
        """Store a result and wake the clients that wait for it.

        Args:
            also: writes further rows with the first result.
        """
        await self._settle(future, (DONE, media_type, result, None), also)

    async def fail(
        self, future: FutureRecord, message: str, category: str, also: Also | None = None
    ) -> None:
        """Store an error message in place of a result; `also` as in `resolve`."""
        await self._settle(future, (FAILED, None, message.encode(errors="replace"), category), also)

    async def fail_by(
        self, future: FutureRecord, error: BaseException, also: Also | None = None
    ) -> None:
        """Store an exception with a message for the client; `also` as in `resolve`."""
        if isinstance(error, PcgError | ApiError):
            reply = as_api_error(error)
            category = USER if reply.status_code < 500 else SERVER
            await self.fail(future, reply.detail, category, also)
        else:
            LOG.error("future %s failed", future.id, exc_info=error)
            words = "The server had an error; its log says more."
            await self.fail(future, words, SERVER, also)

    async def _settle(
        self,
        future: FutureRecord,
        settled: tuple[str, str | None, bytes, str | None],
        also: Also | None,
    ) -> None:
        def act(connection: sqlite3.Connection) -> bool:
            is_first = settle(connection, future.id, *settled)
            if is_first and also is not None:
                also(connection)
            return is_first

        while True:  # a promised result is kept, but a full disk may delay it
            try:
                is_first = await self._store.write(act)
                break
            except StoreFullError as error:
                LOG.error("the result of %s waits to be stored: %s", future.id, error)
                await asyncio.sleep(AGAIN_S)
        if is_first:
            tenant, size = future.tenant, len(settled[2])
            self._counts[tenant] = self._counts.get(tenant, 1) - 1
            self._bytes[tenant] = self._bytes.get(tenant, 0) + size
        self._wake(future.id)

    async def expire(self) -> None:
        """Remove expired results, and recount the rest from time to time."""
        is_due = time.monotonic() >= self._count_s

        def act(connection: sqlite3.Connection) -> dict[str, tuple[int, int]] | None:
            connection.execute(
                f"DELETE FROM {FUTURES.name} WHERE finished_s < ? AND state IN (?, ?) "
                "AND request IS NULL",  # a stored request may have to be repeated
                (now() - _KEPT_S, DONE, FAILED),
            )
            return used_by_futures(connection) if is_due else None

        used = await self._store.write(act)
        if used is not None:
            self._count(used)

    # ------------------------------------------------------------------------------- waiting

    async def retrieve(self, tenant: str, id: str, timeout_s: float) -> FutureRecord:
        """Return a tenant's future when it is settled, or still pending after a timeout.

        Raises:
            ApiError: 410, the future does not exist or has expired.
        """
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(id, set())
        waiting.add(settled)
        try:
            future = await self._find(tenant, id)
            if future.state != PENDING:
                return future
            await asyncio.wait((settled,), timeout=0 if self.is_closing else timeout_s)
            return await self._find(tenant, id) if settled.done() else future
        finally:
            waiting.discard(settled)
            if not waiting and self._waiting.get(id) is waiting:
                del self._waiting[id]

    async def _find(self, tenant: str, id: str) -> FutureRecord:
        future = await self._store.read(FUTURES.find, id=id, tenant=tenant)
        if future is None:
            raise ApiError(
                410, f"There is no request {id[:128]}, or it has expired.", code="expired"
            )
        return future

    async def pending(self, kind: str) -> list[FutureRecord]:
        return await self._store.read(FUTURES.select, state=PENDING, kind=kind)

    def close(self) -> None:
        """Stop all waiting, as the server ends."""
        self.is_closing = True
        for id in list(self._waiting):
            self._wake(id)

    def _wake(self, id: str) -> None:
        for settled in self._waiting.pop(id, ()):
            if not settled.done():
                settled.set_result(None)

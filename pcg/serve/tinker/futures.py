"""Futures: promises of results, which outlast the server, and those who wait for them.

A promise is a row before its client is told of it, and its result is a row before anybody has that.
So whatever was acknowledged is there after a crash: what is settled has the same result, and what
is pending is done by whoever takes up its stream.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from pcg.errors import PcgError, StoreFullError
from pcg.serve.http.errors import LOG, ApiError, as_api_error
from pcg.serve.store.database import Database
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker import future_records as records
from pcg.serve.tinker.future_records import DONE, FAILED, FUTURES, SERVER, USER, FutureRecord

Found = TypeVar("Found")
Beside: TypeAlias = Callable[[sqlite3.Connection], None]
"""Writes further rows in the transaction of a future's."""

MOST_PENDING = 8192
"""The most futures of a tenant that are pending."""
MOST_BYTES = 4 * 2**30
"""The most bytes of requests and results that the futures of a tenant keep."""
AGAIN_S = 5.0
"""Time after which it is tried again to keep a result on a full disk, seconds."""
_KEPT_S = 24 * 3600
"""Time for which a result is kept, seconds."""
_COUNT_S = 300.0
"""Time between two counts of all rows, which take two seconds for a million."""


class Futures:
    """The futures of all tenants; for one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._is_closing = False
        self._counts: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._count(database.read(records.used).result())

    def _count(self, used: Mapping[str, tuple[int, int]]) -> None:
        self._count_s = time.monotonic() + _COUNT_S
        self._counts = {tenant: count for tenant, (count, _) in used.items()}
        self._bytes = {tenant: size for tenant, (_, size) in used.items()}

    async def write(
        self, act: Callable[[sqlite3.Connection], Found], *, may_use_reserve: bool = False
    ) -> Found:
        """Run a function in a transaction, and wait for the disk."""
        write = self._database.write(act, may_use_reserve=may_use_reserve)
        return await asyncio.wrap_future(write)

    async def read(self, act: Callable[[sqlite3.Connection], Found]) -> Found:
        """Run a function on what is kept."""
        return await asyncio.wrap_future(self._database.read(act))

    async def promise(
        self,
        tenant: str,
        session: str,
        stream: str,
        seq: int,
        kind: str,
        request: bytes,
        answer: Mapping[str, Any] | None = None,
        beside: Beside | None = None,
    ) -> tuple[FutureRecord, bool]:
        """Keep a request, and return its future, with True if it is new.

        Args:
            stream, seq: the place of the request; a second one at a place is the first.
            request: what is needed to do it, after a crash, too.
            answer: what the client is told beside `request_id`.
            beside: what else is written with it, if it is new.
        Raises:
            ApiError: the tenant has too many futures, or something else was asked at the place.
        """
        record = FutureRecord(
            new_key("req-"), tenant, session, stream, seq, kind, json.dumps(answer or {}), now(),
            request,
        )  # fmt: skip

        def act(connection: sqlite3.Connection) -> tuple[FutureRecord, bool]:
            there = FUTURES.find(connection, stream=stream, seq=seq)
            if there is not None:
                if there.kind != kind:
                    raise ApiError(
                        400,
                        f"The request {seq} is a {there.kind}, and this is a {kind}; number "
                        "requests one by one.",
                        param="seq_id",
                    )
                return there, False
            self._check(tenant, record.size_bytes)
            FUTURES.insert(connection, record)
            if beside is not None:
                beside(connection)
            return record, True

        found, is_new = await self.write(act)
        if is_new:
            self._counts[tenant] = self._counts.get(tenant, 0) + 1
            self._bytes[tenant] = self._bytes.get(tenant, 0) + found.size_bytes
        return found, is_new

    def _check(self, tenant: str, size_bytes: int) -> None:
        """Refuse a request of a tenant that has too many."""
        count, size = self._counts.get(tenant, 0), self._bytes.get(tenant, 0) + size_bytes
        if count >= MOST_PENDING:
            raise ApiError(
                429, f"{count} of your requests wait already; ask again later.", code="queue_full"
            )
        if size > MOST_BYTES:
            raise ApiError(
                429,
                f"Your requests and their results keep {size} bytes, and {MOST_BYTES} are the "
                "most; ask again later.",
                code="queue_full",
            )

    # ------------------------------------------------------------------------------- settling

    async def resolve(
        self,
        future: FutureRecord,
        result: bytes,
        media_type: str,
        beside: Beside | None = None,
    ) -> None:
        """Keep a result, and have those who wait take it.

        Args:
            beside: what else is written with it, if it is the first.
        """
        await self._settle(future, DONE, media_type, result, None, beside)

    async def fail(
        self, future: FutureRecord, message: str, category: str, beside: Beside | None = None
    ) -> None:
        """Keep why there is no result; `beside` as of `resolve`."""
        told = message.encode(errors="replace")
        await self._settle(future, FAILED, None, told, category, beside)

    async def fail_by(
        self, future: FutureRecord, error: BaseException, beside: Beside | None = None
    ) -> None:
        """Keep an error as a client is told of it; `beside` as of `resolve`."""
        told = as_api_error(error) if isinstance(error, PcgError | ApiError) else None
        if told is None:
            LOG.error("future %s failed", future.id, exc_info=error)
            said = "The server had an error; its log says more."
            await self.fail(future, said, SERVER, beside)
        else:
            category = USER if told.status_code < 500 else SERVER
            await self.fail(future, told.detail, category, beside)

    async def _settle(
        self,
        future: FutureRecord,
        state: str,
        media_type: str | None,
        result: bytes,
        category: str | None,
        beside: Beside | None,
    ) -> None:
        def act(connection: sqlite3.Connection) -> bool:
            is_first = records.settle(connection, future.id, state, media_type, result, category)
            if is_first and beside is not None:
                beside(connection)
            return is_first

        if await self._write_once_there_is_room(future, act):
            self._counts[future.tenant] = self._counts.get(future.tenant, 1) - 1
            self._bytes[future.tenant] = self._bytes.get(future.tenant, 0) + len(result)
        self._wake(future.id)

    async def _write_once_there_is_room(
        self, future: FutureRecord, act: Callable[[sqlite3.Connection], bool]
    ) -> bool:
        """Write what was promised, which only a disk that is full delays."""
        while True:
            try:
                return await self.write(act)
            except StoreFullError as error:
                LOG.error("the result of %s waits to be kept: %s", future.id, error)
                await asyncio.sleep(AGAIN_S)

    async def expire(self) -> None:
        """Remove results that have been kept for long enough, and now and then count the rest."""
        before = int(time.time()) - _KEPT_S
        is_due = time.monotonic() >= self._count_s

        def act(connection: sqlite3.Connection) -> dict[str, tuple[int, int]] | None:
            records.expire(connection, before)
            return records.used(connection) if is_due else None

        found = await self.write(act)
        if found is not None:
            self._count(found)

    # ------------------------------------------------------------------------------- waiting

    async def retrieve(self, tenant: str, id: str, timeout_s: float) -> FutureRecord:
        """Return a tenant's future, once it is settled, or as it is after a time.

        Raises:
            ApiError: 410, there is none, or none any more.
        """
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        others = self._waiting.setdefault(id, set())
        others.add(settled)
        try:
            found = await self._find(tenant, id)
            if found.state != records.PENDING:
                return found
            await asyncio.wait((settled,), timeout=0 if self._is_closing else timeout_s)
            return await self._find(tenant, id) if settled.done() else found
        finally:
            others.discard(settled)
            if not others and self._waiting.get(id) is others:
                del self._waiting[id]

    async def _find(self, tenant: str, id: str) -> FutureRecord:
        found = await self.read(lambda one: FUTURES.find(one, id=id, tenant=tenant))
        if found is None:
            raise ApiError(
                410, f"There is no request {id[:128]}, or none any more.", code="expired"
            )
        return found

    def close(self) -> None:
        """Have nobody wait any more, as the server ends."""
        self._is_closing = True
        for id in list(self._waiting):
            self._wake(id)

    @property
    def is_closing(self) -> bool:
        """True once the server ends."""
        return self._is_closing

    def _wake(self, id: str) -> None:
        for one in self._waiting.pop(id, ()):
            if not one.done():
                one.set_result(None)

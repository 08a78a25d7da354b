"""The files of a server: kept, found and deleted for their owners."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pcg.serve.files import records
from pcg.serve.files.quota import Quota
from pcg.serve.files.records import FileRecord, Page
from pcg.serve.files.wire import missing
from pcg.serve.http.errors import ApiError
from pcg.serve.store.contents import Incoming
from pcg.serve.store.store import Store
from pcg.serve.store.tables import new_key, now

Result = TypeVar("Result")


class Files:
    """The files of all tenants.

    Attributes:
        store: what keeps them.
        quota: bounds what each tenant keeps.
    """

    def __init__(self, store: Store, quota: Quota) -> None:
        self.store = store
        self.quota = quota
        self._completing: set[str] = set()

    async def write(
        self, act: Callable[[sqlite3.Connection], Result], *, may_use_reserve: bool = False
    ) -> Result:
        """Run a function in a transaction, and wait for the disk; as of `Database.write`."""
        write = self.store.database.write(act, may_use_reserve=may_use_reserve)
        return await asyncio.wrap_future(write)

    async def read(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run a function on what is kept."""
        return await asyncio.wrap_future(self.store.database.read(act))

    async def kept_bytes(self, tenant: str) -> int:
        """Count the bytes that a tenant keeps, once what has expired is removed."""
        over = await self.write(lambda one: records.expire(one, now()), may_use_reserve=True)
        await self.remove(over)
        return (await self.read(lambda one: records.used(one, tenant, now())))[1]

    async def keep(self, record: FileRecord, content: Incoming) -> FileRecord:
        """Keep a file. ApiError: the tenant keeps too much."""

        def act(connection: sqlite3.Connection) -> FileRecord:
            self.quota.check(connection, record.tenant, record.size_bytes)
            records.FILES.insert(connection, record)
            return record

        return await self.put(content, act)

    async def put(self, content: Incoming, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Put a content among the others, and run the function that writes the row naming it.

        Neither is there if the write fails, so that a full disk has its room back.
        """

        def put(connection: sqlite3.Connection) -> Result:
            found = act(connection)
            self.store.contents.put(content)
            return found

        try:
            return await self.write(put)
        except Exception:
            await self.remove([content.digest])
            raise

    async def find(self, tenant: str, id: str) -> FileRecord:
        """Return a tenant's file. ApiError: there is none."""
        found = await self.read(lambda one: records.find(one, tenant, id, now()))
        if found is None:
            raise missing("File", id)
        return found

    async def listed(self, tenant: str, page: Page, purpose: str | None) -> list[FileRecord]:
        """Return a page of a tenant's files, and one more where there are others."""
        return await self.read(lambda one: records.listed(one, tenant, page, purpose, now()))

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a tenant's file. ApiError: there is none."""
        digest = await self.write(
            lambda one: records.delete(one, tenant, id, now()), may_use_reserve=True
        )
        if digest is None:
            raise missing("File", id)
        await self.remove([digest])

    @contextmanager
    def completing(self, upload: str) -> Iterator[None]:
        """Join the parts of an upload within a `with`, once at a time: each makes a copy.

        ApiError: it is being done already.
        """
        if upload in self._completing:
            raise ApiError(409, "The upload is being completed.", param="upload_id")
        self._completing.add(upload)
        try:
            yield
        finally:
            self._completing.discard(upload)

    async def remove(self, digests: list[str]) -> None:
        """Remove contents that nothing names any more."""
        if digests:
            remove = self.store.contents.remove_unnamed
            await self.write(
                lambda one: [remove(one, digest) for digest in digests], may_use_reserve=True
            )


def new_file(
    tenant: str, filename: str, purpose: str, content: Incoming, life_s: int | None
) -> FileRecord:
    """Return the row of a new file."""
    created = now()
    return FileRecord(
        new_key("file-"),
        tenant,
        filename,
        purpose,
        content.size_bytes,
        created,
        None if life_s is None else created + life_s,
        content.digest,
    )

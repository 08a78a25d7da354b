"""The files of a server: rows, quotas, and operations for their owners.

A quota limits the number of a tenant's files, and their bytes including those being received.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import ApiError
from pcg.serve.store.contents import Incoming
from pcg.serve.store.store import Store
from pcg.serve.store.tables import Table, held_bytes, new_key, now

Result = TypeVar("Result")
Item = TypeVar("Item", bound=BaseModel)

RESULTS = "fine-tune-results"
"""Purpose of files that jobs create."""
MOST_OVER = 1000
"""The most ended uploads of a tenant that are kept."""
PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"
_LIVES = "expires_s IS NULL OR expires_s > ?"


@dataclass(frozen=True)
class FileRecord:
    """A file.

    Attributes:
        filename: its name from the client.
        created_s, expires_s: Unix seconds; `expires_s` is None for a file that stays until it is
            deleted.
        digest: the SHA-256 of its content.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_s: int
    expires_s: int | None
    digest: str


@dataclass(frozen=True)
class UploadRecord:
    """An upload; its room is reserved from the start.

    Attributes:
        size_bytes: bytes of all its parts, announced by the client.
        file_expires_after_s: lifetime of its file; None for a file that stays until it is deleted.
        file: the id of its file, once it is completed.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    mime_type: str
    size_bytes: int
    created_s: int
    expires_s: int
    file_expires_after_s: int | None
    status: str
    file: str | None = None


@dataclass(frozen=True)
class PartRecord:
    """A part of an upload."""

    id: str
    upload: str
    created_s: int
    size_bytes: int
    digest: str


FILES = Table("files", FileRecord)
UPLOADS = Table("uploads", UploadRecord)
PARTS = Table("upload_parts", PartRecord)


class ListPage(BaseModel, Generic[Item]):
    """A page of a list; `after` with the last id requests the next page."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


@dataclass(frozen=True)
class Page:
    """A part of a list.

    Attributes:
        after: the id of the last entry before the page; None for the first page.
        limit: the most entries.
        is_rising: True to list the oldest first.
    """

    after: str | None
    limit: int
    is_rising: bool = False

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition of the rows after `after`, and its values."""
        if self.after is None:
            return "1", []
        return f"id {'>' if self.is_rising else '<'} ?", [self.after]

    @property
    def order(self) -> str:
        """The end of a query, which also reads one row beyond the page."""
        return f"ORDER BY id {'ASC' if self.is_rising else 'DESC'} LIMIT {self.limit + 1}"

    def shown(self, records: Sequence[Any], kind: type[Item]) -> ListPage[Item]:
        """Return the page; a record beyond its limit means that more follow."""
        data = [kind.model_validate(record) for record in records[: self.limit]]
        first, last = (records[0].id, records[len(data) - 1].id) if data else (None, None)
        has_more = len(records) > self.limit
        return ListPage(data=data, first_id=first, last_id=last, has_more=has_more)


def missing(kind: str, id: str) -> ApiError:
    """Return the error of an object that the caller does not own."""
    return ApiError(404, f"No such {kind} object: {id[:128]}", param="id")


def used(connection: sqlite3.Connection, tenant: str, now_s: int) -> tuple[int, int]:
    """Count a tenant's files and reserved uploads, and their bytes including jobs'."""
    sizes = "COUNT(*), COALESCE(SUM(size_bytes), 0)"
    kept = FILES.read(connection, sizes, _LIVES, (now_s,), tenant=tenant)[0]
    (pending,) = UPLOADS.read(
        connection, sizes, "expires_s > ?", (now_s,), tenant=tenant, status=PENDING
    )
    held = held_bytes(connection, tenant, now_s)
    return kept[0] + pending[0], kept[1] + pending[1] + held


def expire(connection: sqlite3.Connection, now_s: int) -> list[str]:
    """Delete expired files and uploads; return the digests of their blobs."""
    late = "status = 'pending' AND expires_s <= ?"
    files = FILES.delete(connection, "expires_s <= ?", (now_s,))
    parts = PARTS.delete(connection, f"upload IN (SELECT id FROM uploads WHERE {late})", (now_s,))
    UPLOADS.change(connection, {"status": EXPIRED}, late, (now_s,))
    return list({*(file.digest for file in files), *(part.digest for part in parts)})


def add_upload(connection: sqlite3.Connection, record: UploadRecord) -> None:
    """Add an upload; drop the tenant's oldest ended uploads beyond the limit."""
    UPLOADS.insert(connection, record)
    connection.execute(
        "DELETE FROM uploads WHERE tenant = ?1 AND status != 'pending' AND id NOT IN (SELECT id "
        "FROM uploads WHERE tenant = ?1 AND status != 'pending' ORDER BY id DESC LIMIT ?2)",
        (record.tenant, MOST_OVER),
    )


def bytes_to_come(connection: sqlite3.Connection, tenant: str) -> int:
    """Count the reserved bytes that a tenant's pending uploads have not received."""
    (count,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes - (SELECT COALESCE(SUM(part_bytes), 0) FROM "
        "(SELECT DISTINCT digest, upload_parts.size_bytes AS part_bytes FROM upload_parts "
        "WHERE upload = uploads.id))), 0) "
        "FROM uploads WHERE tenant = ? AND status = 'pending'",
        (tenant,),
    ).fetchone()
    return int(count)


def end_upload(
    connection: sqlite3.Connection, id: str, status: str, file: str | None = None
) -> list[str]:
    """End an upload; return the digests of its parts."""
    digests = [part.digest for part in PARTS.delete(connection, upload=id)]
    UPLOADS.change(connection, {"status": status, "file": file}, id=id)
    return digests


class Quota:
    """The quotas of a server's tenants."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._files: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()

    @contextmanager
    def flight(
        self, tenant: str, kept_bytes: int, part: int | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Count a file or a part of an upload by the yielded function, which takes received bytes.

        Args:
            kept_bytes: bytes that the tenant stores, for a part without the room of its uploads.
            part: the most bytes of the part; None for a file.
        """
        coming, most = self._files, self._options.max_file_bytes
        if part is not None:
            coming, most = self._parts, part
        room, received = self._options.tenant_files_bytes - kept_bytes, 0

        def receive(size_bytes: int) -> None:
            nonlocal received
            received += size_bytes
            coming[tenant] += size_bytes
            if received > most:
                raise ApiError(
                    413,
                    f"The file has more than {most} bytes; send less.",
                    param="file",
                    code="file_too_large",
                    headers={"connection": "close"},
                )
            if coming[tenant] > room:
                raise _over_quota("bytes")

        try:
            yield receive
        finally:
            coming[tenant] -= received
            if not coming[tenant]:
                del coming[tenant]

    def check(self, connection: sqlite3.Connection, tenant: str, size_bytes: int) -> None:
        if used(connection, tenant, now())[0] >= self._options.tenant_files:
            raise _over_quota(f"files, at most {self._options.tenant_files}")
        self.check_bytes(connection, tenant, size_bytes)

    def check_bytes(self, connection: sqlite3.Connection, tenant: str, size_bytes: int) -> None:
        """Raise an ApiError if a tenant may not store that many further bytes."""
        if used(connection, tenant, now())[1] + size_bytes > self._options.tenant_files_bytes:
            raise _over_quota(f"bytes, at most {self._options.tenant_files_bytes}")


def _over_quota(what: str) -> ApiError:
    return ApiError(
        429,
        f"You store too many {what}, in files, uploads and jobs' results; delete some.",
        code="insufficient_quota",
        headers={"x-should-retry": "false", "connection": "close"},
    )


class Files:
    """The files of all tenants."""

    def __init__(self, store: Store, quota: Quota) -> None:
        self.store = store
        self.quota = quota
        self._completing: set[str] = set()

    async def write(
        self, act: Callable[[sqlite3.Connection], Result], *, may_use_reserve: bool = False
    ) -> Result:
        """Run a function in a transaction and wait for the disk; see `Database.write`."""
        write = self.store.database.write(act, may_use_reserve=may_use_reserve)
        return await asyncio.wrap_future(write)

    async def read(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        return await asyncio.wrap_future(self.store.database.read(act))

    async def kept_bytes(self, tenant: str) -> int:
        """Remove expired files, then count the bytes that a tenant stores."""
        over = await self.write(lambda db: expire(db, now()), may_use_reserve=True)
        await self.remove(over)
        return (await self.read(lambda db: used(db, tenant, now())))[1]

    async def keep(self, record: FileRecord, content: Incoming) -> FileRecord:
        """Store a file. ApiError: the tenant stores too much."""

        def act(connection: sqlite3.Connection) -> FileRecord:
            self.quota.check(connection, record.tenant, record.size_bytes)
            FILES.insert(connection, record)
            return record

        return await self.put(content, act)

    async def put(self, content: Incoming, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Store a blob, and run the function that writes its row.

        If the write fails, both are undone, so a full disk gets its room back.
        """

        def put(connection: sqlite3.Connection) -> Result:
            result = act(connection)
            self.store.contents.put(content)
            return result

        try:
            return await self.write(put)
        except Exception:
            await self.remove([content.digest])
            raise

    async def find(self, tenant: str, id: str) -> FileRecord:
        record = await self.read(lambda db: find_file(db, tenant, id))
        if record is None:
            raise missing("File", id)
        return record

    async def listed(self, tenant: str, page: Page, purpose: str | None) -> list[FileRecord]:
        """Return a page of a tenant's files, and a further file if more follow."""
        behind, values = page.condition()
        equal = {"tenant": tenant, **({} if purpose is None else {"purpose": purpose})}
        condition = f"({_LIVES}) AND {behind}"
        return await self.read(
            lambda db: FILES.select(db, condition, (now(), *values), page.order, **equal)
        )

    async def delete(self, tenant: str, id: str) -> None:
        deleted = await self.write(
            lambda db: FILES.delete(db, _LIVES, (now(),), tenant=tenant, id=id),
            may_use_reserve=True,
        )
        if not deleted:
            raise missing("File", id)
        await self.remove([record.digest for record in deleted])

    @contextmanager
    def completing(self, upload: str) -> Iterator[None]:
        """Guard the joining of an upload's parts, as each call makes a copy.

        ApiError: the upload is already being completed.
        """
        if upload in self._completing:
            raise ApiError(409, "The upload is being completed.", param="upload_id")
        self._completing.add(upload)
        try:
            yield
        finally:
            self._completing.discard(upload)

    async def remove(self, digests: Sequence[str]) -> None:
        if digests:
            remove = self.store.contents.remove_unnamed
            await self.write(
                lambda db: [remove(db, digest) for digest in digests], may_use_reserve=True
            )


def find_file(connection: sqlite3.Connection, tenant: str, id: str) -> FileRecord | None:
    """Return a tenant's file, or None for an unknown id or an expired file."""
    return FILES.find(connection, _LIVES, (now(),), tenant=tenant, id=id)


def new_file(
    tenant: str, filename: str, purpose: str, content: Incoming, life_s: int | None
) -> FileRecord:
    """Return the row of a new file."""
    created = now()
    return FileRecord(
        new_key("file-"),
        tenant,
        filename,
        purpose=purpose,
        size_bytes=content.size_bytes,
        created_s=created,
        expires_s=None if life_s is None else created + life_s,
        digest=content.digest,
    )

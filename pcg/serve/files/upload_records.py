"""Rows of uploads and of their parts."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from pcg.serve.store.tables import Table

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"
MOST_OVER = 1000
"""The uploads of a tenant that are over and that are still told of."""


@dataclass(frozen=True)
class UploadRecord:
    """An upload, whose room is the tenant's from the beginning.

    Attributes:
        size_bytes: bytes of all its parts, as the client says first.
        file_expires_after_s: how long its file will be kept; None for as long as nobody deletes it.
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


UPLOADS = Table("uploads", UploadRecord)
PARTS = Table("upload_parts", PartRecord)


def insert(connection: sqlite3.Connection, record: UploadRecord) -> None:
    """Add an upload; of its tenant's that are over the newest stay."""
    UPLOADS.insert(connection, record)
    connection.execute(
        "DELETE FROM uploads WHERE tenant = ?1 AND status != 'pending' AND id NOT IN (SELECT id "
        "FROM uploads WHERE tenant = ?1 AND status != 'pending' ORDER BY id DESC LIMIT ?2)",
        (record.tenant, MOST_OVER),
    )


def parts(connection: sqlite3.Connection, upload: str) -> dict[str, PartRecord]:
    """Return the parts of an upload, by id."""
    return {part.id: part for part in PARTS.select(connection, upload=upload)}


def to_come(connection: sqlite3.Connection, tenant: str) -> int:
    """Count the bytes that a tenant's pending uploads have room for, and that are not there."""
    (found,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes - (SELECT COALESCE(SUM(part_bytes), 0) FROM "
        "(SELECT DISTINCT digest, upload_parts.size_bytes AS part_bytes FROM upload_parts "
        "WHERE upload = uploads.id))), 0) "
        "FROM uploads WHERE tenant = ? AND status = 'pending'",
        (tenant,),
    ).fetchone()
    return int(found)


def end(connection: sqlite3.Connection, id: str, status: str, file: str | None = None) -> list[str]:
    """End an upload; returns the digests that its parts had."""
    digests = [part.digest for part in PARTS.delete(connection, upload=id)]
    UPLOADS.change(connection, {"status": status, "file": file}, id=id)
    return digests

"""Rows of files: what is known of each, by its owner."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from pcg.serve.store.tables import Table, held_bytes

RESULTS = "fine-tune-results"
"""The purpose of files that jobs make."""


@dataclass(frozen=True)
class FileRecord:
    """A file that is kept.

    Attributes:
        filename: its name as the client wrote it.
        created_s, expires_s: Unix seconds; None for a file that stays until it is deleted.
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


FILES = Table("files", FileRecord)
_LIVES = "expires_s IS NULL OR expires_s > ?"


def find(connection: sqlite3.Connection, tenant: str, id: str, now_s: int) -> FileRecord | None:
    """Return a tenant's file; None if there is none of the id, or it has expired."""
    return FILES.find(connection, _LIVES, (now_s,), tenant=tenant, id=id)


@dataclass(frozen=True)
class Page:
    """A part of a list that a client asks for.

    Attributes:
        after: the id of the last one before it; None for the beginning.
        limit: the most of them.
        is_rising: True for the oldest first.
    """

    after: str | None
    limit: int
    is_rising: bool

    def condition(self) -> tuple[str, list[Any]]:
        """Return the part of a statement that picks what comes behind `after`, and its values."""
        if self.after is None:
            return "1", []
        return f"id {'>' if self.is_rising else '<'} ?", [self.after]

    @property
    def order(self) -> str:
        """The end of a statement: one more row than the page has tells whether others follow."""
        return f"ORDER BY id {'ASC' if self.is_rising else 'DESC'} LIMIT {self.limit + 1}"


def listed(
    connection: sqlite3.Connection, tenant: str, page: Page, purpose: str | None, now_s: int
) -> list[FileRecord]:
    """Return a page of a tenant's files, and one more where there are others."""
    behind, values = page.condition()
    equal = {} if purpose is None else {"purpose": purpose}
    condition = f"({_LIVES}) AND {behind}"
    return FILES.select(connection, condition, (now_s, *values), page.order, tenant=tenant, **equal)


def delete(connection: sqlite3.Connection, tenant: str, id: str, now_s: int) -> str | None:
    """Delete a tenant's file; returns its digest, or None if there is none."""
    deleted = FILES.delete(connection, _LIVES, (now_s,), tenant=tenant, id=id)
    return deleted[0].digest if deleted else None


def used(connection: sqlite3.Connection, tenant: str, now_s: int) -> tuple[int, int]:
    """Count what a tenant keeps or was promised room for: files, and bytes with those of jobs."""
    sizes = "COUNT(*), COALESCE(SUM(size_bytes), 0)"
    kept = FILES.read(connection, sizes, _LIVES, (now_s,), tenant=tenant)[0]
    (pending,) = connection.execute(
        f"SELECT {sizes} FROM uploads WHERE tenant = ? AND status = 'pending' AND expires_s > ?",
        (tenant, now_s),
    )
    held = held_bytes(connection, tenant, now_s)
    return kept[0] + pending[0], kept[1] + pending[1] + held


def expire(connection: sqlite3.Connection, now_s: int) -> list[str]:
    """Delete the files and uploads whose time is over; returns the digests that they had."""
    digests = [
        digest
        for (digest,) in connection.execute(
            "SELECT digest FROM files WHERE expires_s <= ?1 UNION SELECT upload_parts.digest "
            "FROM upload_parts JOIN uploads ON uploads.id = upload "
            "WHERE status = 'pending' AND uploads.expires_s <= ?1",
            (now_s,),
        )
    ]
    over = "SELECT id FROM uploads WHERE status = 'pending' AND expires_s <= ?"
    FILES.delete(connection, "expires_s <= ?", (now_s,))
    connection.execute(f"DELETE FROM upload_parts WHERE upload IN ({over})", (now_s,))
    connection.execute(
        "UPDATE uploads SET status = 'expired' WHERE status = 'pending' AND expires_s <= ?",
        (now_s,),
    )
    return digests

"""Rows of sampling sessions, and of what they sample from."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import astuple, dataclass, fields

from pcg.serve.errors import ApiError
from pcg.serve.tinker.session_records import OPEN


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session.

    Attributes:
        session: the client's session that it is in.
        seq: its number among those of the session.
        base_model: the base's name.
        path: the checkpoint that it samples from, as `tinker://…`; None for the base, and for
            weights that were saved for it alone.
        folder: the folder of its adapter, relative to the store's; None for the base.
        size_bytes: bytes of weights that were saved for it alone.
    """

    id: str
    tenant: str
    session: str
    seq: int
    base_model: str
    path: str | None
    folder: str | None
    created_s: int
    size_bytes: int = 0


MOST_SAMPLERS = 65_536
"""The most sampling sessions of a client's session."""
_COLUMNS = ", ".join(field.name for field in fields(SamplerRecord))


def insert(connection: sqlite3.Connection, record: SamplerRecord) -> SamplerRecord:
    """Add a sampling session, and return it; or the one that has its number already.

    Raises:
        ApiError: the client's session has too many.
    """
    there = count(connection, record.session)
    if there >= MOST_SAMPLERS:
        raise ApiError(429, f"The session has {there} sampling sessions; open another session.")
    values = astuple(record)
    places = ", ".join("?" for _ in values)
    connection.execute(
        f"INSERT OR IGNORE INTO tinker_samplers ({_COLUMNS}) VALUES ({places})", values
    )
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM tinker_samplers WHERE session = ? AND seq = ?",
        (record.session, record.seq),
    ).fetchone()
    return SamplerRecord(*row)


def find(connection: sqlite3.Connection, id: str, tenant: str) -> SamplerRecord | None:
    """Return a tenant's sampling session; None without."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM tinker_samplers WHERE id = ? AND tenant = ?", (id, tenant)
    ).fetchone()
    return None if row is None else SamplerRecord(*row)


def of_session(connection: sqlite3.Connection, session: str) -> list[str]:
    """Return the ids of the sampling sessions of a client's session."""
    rows = connection.execute(
        "SELECT id FROM tinker_samplers WHERE session = ? ORDER BY seq", (session,)
    )
    return [id for (id,) in rows]


MOST_EPHEMERAL = 64
"""The most sampling sessions of a client's session that have weights of their own."""


def surplus(connection: sqlite3.Connection, session: str) -> SamplerRecord | None:
    """Return the oldest sampling session with weights of its own, if there are enough of them."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM tinker_samplers WHERE session = ? AND path IS NULL "
        "AND folder IS NOT NULL ORDER BY id DESC LIMIT 1 OFFSET ?",
        (session, MOST_EPHEMERAL - 1),
    ).fetchone()
    return None if rows is None else SamplerRecord(*rows)


def delete(connection: sqlite3.Connection, id: str) -> None:
    """Remove a sampling session."""
    connection.execute("DELETE FROM tinker_samplers WHERE id = ?", (id,))


def end(connection: sqlite3.Connection, session: str) -> list[str]:
    """Remove the sampling sessions with weights of their own; returns the folders of these."""
    rows = connection.execute(
        "DELETE FROM tinker_samplers WHERE session = ? AND path IS NULL AND folder IS NOT NULL "
        "RETURNING folder",
        (session,),
    )
    return [folder for (folder,) in rows]


def end_left(connection: sqlite3.Connection) -> None:
    """Remove those with weights of their own that a crash left of sessions which have ended."""
    connection.execute(
        "DELETE FROM tinker_samplers WHERE path IS NULL AND folder IS NOT NULL "
        "AND session NOT IN (SELECT id FROM tinker_sessions WHERE status = ?)",
        (OPEN,),
    )


def count(connection: sqlite3.Connection, session: str) -> int:
    """Count the sampling sessions of a client's session."""
    found = connection.execute(
        "SELECT COUNT(*) FROM tinker_samplers WHERE session = ?", (session,)
    ).fetchone()
    return int(found[0])


def checkpoint(connection: sqlite3.Connection, path: str, tenant: str) -> tuple[str, str] | None:
    """Return the folder and the base of a checkpoint that a tenant may read; None without."""
    row = connection.execute(
        "SELECT folder, base_model FROM tinker_checkpoints WHERE path = ? "
        "AND (tenant = ? OR is_public) AND (expires_s IS NULL OR expires_s > ?)",
        (path, tenant, int(time.time())),
    ).fetchone()
    return None if row is None else (row[0], row[1])


def forget_request(connection: sqlite3.Connection, future: str) -> None:
    """Drop the body of a request that is done."""
    connection.execute("UPDATE tinker_futures SET request = NULL WHERE id = ?", (future,))


def own_folders(connection: sqlite3.Connection) -> set[str]:
    """Return the folders of weights that were saved for a sampling session alone."""
    rows = connection.execute(
        "SELECT folder FROM tinker_samplers WHERE path IS NULL AND folder IS NOT NULL"
    )
    return {str(row[0]) for row in rows}

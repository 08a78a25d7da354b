"""Rows of sessions: the clients that ask, each of which says that it lives."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from pcg.serve.store.tables import Table
from pcg.serve.tinker.folders import run_folder
from pcg.serve.tinker.model_records import COPIES

OPEN = "open"


@dataclass(frozen=True)
class SessionRecord:
    """A session.

    Attributes:
        status: `open`, or how it ended: success, errored, interrupted or expired.
        tags, user_metadata: JSON of what the client says of it.
        ended_s: when it ended; None while it is open, and of those that an older pcg ended.
    """

    id: str
    tenant: str
    created_s: int
    status: str
    tags: str
    user_metadata: str | None
    display_name: str | None
    sdk_version: str
    ended_s: int | None = None


SESSIONS = Table("tinker_sessions", SessionRecord)


def end(connection: sqlite3.Connection, id: str, status: str) -> bool:
    """End a session; returns False if it has ended already."""
    ended = {"status": status, "ended_s": int(time.time())}
    return SESSIONS.change(connection, ended, id=id, status=OPEN) > 0


def forget(connection: sqlite3.Connection, before_s: float, most: int) -> list[str]:
    """Remove the sessions that ended before a time, and a tenant's oldest beyond so many.

    What they asked for and sampled from goes with them; their models do unless there are
    checkpoints of them, and then the session stays, too.

    Returns:
        Folders that nothing names any more.
    """
    folders = []
    for session in _ended(connection, before_s, most):
        rows = connection.execute(
            "DELETE FROM tinker_samplers WHERE session = ? RETURNING path, folder", (session,)
        ).fetchall()
        folders += [str(folder) for path, folder in rows if path is None and folder is not None]
        connection.execute("DELETE FROM tinker_losses WHERE session = ?", (session,))
        connection.execute(
            "DELETE FROM tinker_futures WHERE session = ? AND state <> 'pending'", (session,)
        )
        models = connection.execute(
            "DELETE FROM tinker_models WHERE session = ? AND NOT EXISTS "
            "(SELECT 1 FROM tinker_checkpoints WHERE model = tinker_models.id) RETURNING id",
            (session,),
        ).fetchall()
        folders += [run_folder(str(id)) for (id,) in models]
        connection.execute(
            "DELETE FROM tinker_sessions WHERE id = ? AND NOT EXISTS "
            "(SELECT 1 FROM tinker_models WHERE session = tinker_sessions.id)",
            (session,),
        )
    connection.execute(
        "DELETE FROM tinker_models WHERE session GLOB ? AND NOT EXISTS "
        "(SELECT 1 FROM tinker_checkpoints WHERE model = tinker_models.id)",
        (f"{COPIES}*",),
    )
    return folders


def _ended(connection: sqlite3.Connection, before_s: float, most: int) -> list[str]:
    """Return the sessions that may go: none with a model, or a request, that is not done."""
    found = connection.execute(
        "SELECT id FROM tinker_sessions WHERE status <> ? AND COALESCE(ended_s, created_s) < ?",
        (OPEN, before_s),
    ).fetchall()
    many = connection.execute(
        "SELECT tenant FROM tinker_sessions WHERE status <> ? GROUP BY tenant HAVING COUNT(*) > ?",
        (OPEN, most),
    ).fetchall()
    for (tenant,) in many:
        found += connection.execute(
            "SELECT id FROM tinker_sessions WHERE tenant = ? AND status <> ? "
            "ORDER BY id DESC LIMIT -1 OFFSET ?",
            (tenant, OPEN, most),
        ).fetchall()
    busy = connection.execute(
        "SELECT session FROM tinker_models WHERE status = 'open' UNION "
        "SELECT session FROM tinker_futures WHERE state = 'pending'"
    )
    return sorted({str(id) for (id,) in found} - {str(id) for (id,) in busy})

"""Rows of models and checkpoints as they are listed and changed by their owners."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import fields

from pcg.serve.tinker.checkpoint_records import CheckpointRecord
from pcg.serve.tinker.model_records import ModelRecord

_CHECKPOINTS = ", ".join(field.name for field in fields(CheckpointRecord))
_MODELS = ", ".join(field.name for field in fields(ModelRecord))
_LIVE = "(expires_s IS NULL OR expires_s > ?)"


def models(
    connection: sqlite3.Connection, tenant: str, limit: int, offset: int
) -> tuple[list[ModelRecord], int]:
    """Return some of a tenant's models, the newest first, and the number of all."""
    rows = connection.execute(
        f"SELECT {_MODELS} FROM tinker_models WHERE tenant = ? "
        "ORDER BY created_s DESC, rowid DESC LIMIT ? OFFSET ?",
        (tenant, limit, offset),
    )
    found = [ModelRecord(*row) for row in rows]
    (count,) = connection.execute(
        "SELECT COUNT(*) FROM tinker_models WHERE tenant = ?", (tenant,)
    ).fetchone()
    return found, int(count)


def of_session(connection: sqlite3.Connection, session: str, tenant: str) -> list[str]:
    """Return the ids of the models of a session."""
    rows = connection.execute(
        "SELECT id FROM tinker_models WHERE session = ? AND tenant = ? ORDER BY seq",
        (session, tenant),
    )
    return [id for (id,) in rows]


def sessions(connection: sqlite3.Connection, tenant: str, limit: int, offset: int) -> list[str]:
    """Return the ids of some of a tenant's sessions, the newest first."""
    rows = connection.execute(
        "SELECT id FROM tinker_sessions WHERE tenant = ? ORDER BY id DESC LIMIT ? OFFSET ?",
        (tenant, limit, offset),
    )
    return [id for (id,) in rows]


def checkpoints(
    connection: sqlite3.Connection, tenant: str, limit: int, offset: int
) -> tuple[list[CheckpointRecord], int]:
    """Return some of a tenant's checkpoints, the newest first, and the number of all."""
    now_s = int(time.time())
    rows = connection.execute(
        f"SELECT {_CHECKPOINTS} FROM tinker_checkpoints WHERE tenant = ? AND {_LIVE} "
        "ORDER BY created_s DESC, rowid DESC LIMIT ? OFFSET ?",
        (tenant, now_s, limit, offset),
    )
    found = [CheckpointRecord(*row) for row in rows]
    (count,) = connection.execute(
        f"SELECT COUNT(*) FROM tinker_checkpoints WHERE tenant = ? AND {_LIVE}", (tenant, now_s)
    ).fetchone()
    return found, int(count)


def of_model(connection: sqlite3.Connection, model: str, tenant: str) -> list[CheckpointRecord]:
    """Return the checkpoints of a tenant's model, the newest first."""
    rows = connection.execute(
        f"SELECT {_CHECKPOINTS} FROM tinker_checkpoints WHERE model = ? AND tenant = ? AND {_LIVE} "
        "ORDER BY created_s DESC, rowid DESC",
        (model, tenant, int(time.time())),
    )
    return [CheckpointRecord(*row) for row in rows]


def own(connection: sqlite3.Connection, path: str, tenant: str) -> CheckpointRecord | None:
    """Return a checkpoint that a tenant owns; None without."""
    row = connection.execute(
        f"SELECT {_CHECKPOINTS} FROM tinker_checkpoints WHERE path = ? AND tenant = ? AND {_LIVE}",
        (path, tenant, int(time.time())),
    ).fetchone()
    return None if row is None else CheckpointRecord(*row)


def delete(connection: sqlite3.Connection, path: str, tenant: str) -> str | None:
    """Remove a checkpoint; returns its folder, or None if there is none."""
    row = connection.execute(
        "DELETE FROM tinker_checkpoints WHERE path = ? AND tenant = ? RETURNING folder",
        (path, tenant),
    ).fetchone()
    return None if row is None else str(row[0])


def publish(connection: sqlite3.Connection, path: str, tenant: str, *, is_public: bool) -> bool:
    """Open a checkpoint to all tenants, or close it; returns False if there is none."""
    done = connection.execute(
        "UPDATE tinker_checkpoints SET is_public = ? WHERE path = ? AND tenant = ?",
        (int(is_public), path, tenant),
    )
    return done.rowcount > 0


def set_expiry(
    connection: sqlite3.Connection, path: str, tenant: str, expires_s: int | None
) -> bool:
    """Say when a checkpoint goes; None for never. Returns False if there is none."""
    done = connection.execute(
        "UPDATE tinker_checkpoints SET expires_s = ? WHERE path = ? AND tenant = ?",
        (expires_s, path, tenant),
    )
    return done.rowcount > 0

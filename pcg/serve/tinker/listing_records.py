"""Rows of models and checkpoints as they are listed and changed by their owners."""

from __future__ import annotations

import sqlite3
import time

from pcg.serve.tinker.checkpoint_records import CHECKPOINTS, LIVES, CheckpointRecord
from pcg.serve.tinker.model_records import MODELS, ModelRecord
from pcg.serve.tinker.session_records import SESSIONS

_NEWEST = "ORDER BY created_s DESC, rowid DESC"


def models(
    connection: sqlite3.Connection, tenant: str, limit: int, offset: int
) -> tuple[list[ModelRecord], int]:
    """Return some of a tenant's models, the newest first, and the number of all."""
    order = f"{_NEWEST} LIMIT {limit} OFFSET {offset}"
    found = MODELS.select(connection, order=order, tenant=tenant)
    return found, MODELS.count(connection, tenant=tenant)


def of_session(connection: sqlite3.Connection, session: str, tenant: str) -> list[str]:
    """Return the ids of the models of a session."""
    order = "ORDER BY seq"
    rows = MODELS.read(connection, "id", order=order, session=session, tenant=tenant)
    return [id for (id,) in rows]


def sessions(connection: sqlite3.Connection, tenant: str, limit: int, offset: int) -> list[str]:
    """Return the ids of some of a tenant's sessions, the newest first."""
    order = f"ORDER BY id DESC LIMIT {limit} OFFSET {offset}"
    return [id for (id,) in SESSIONS.read(connection, "id", order=order, tenant=tenant)]


def checkpoints(
    connection: sqlite3.Connection, tenant: str, limit: int, offset: int
) -> tuple[list[CheckpointRecord], int]:
    """Return some of a tenant's checkpoints, the newest first, and the number of all."""
    order, live = f"{_NEWEST} LIMIT {limit} OFFSET {offset}", (int(time.time()),)
    found = CHECKPOINTS.select(connection, LIVES, live, order, tenant=tenant)
    return found, CHECKPOINTS.count(connection, LIVES, live, tenant=tenant)


def of_model(connection: sqlite3.Connection, model: str, tenant: str) -> list[CheckpointRecord]:
    """Return the checkpoints of a tenant's model, the newest first."""
    live = (int(time.time()),)
    return CHECKPOINTS.select(connection, LIVES, live, _NEWEST, model=model, tenant=tenant)


def own(connection: sqlite3.Connection, path: str, tenant: str) -> CheckpointRecord | None:
    """Return a checkpoint that a tenant owns; None without."""
    return CHECKPOINTS.find(connection, LIVES, (int(time.time()),), path=path, tenant=tenant)


def delete(connection: sqlite3.Connection, path: str, tenant: str) -> str | None:
    """Remove a checkpoint; returns its folder, or None if there is none."""
    deleted = CHECKPOINTS.delete(connection, path=path, tenant=tenant)
    return deleted[0].folder if deleted else None


def publish(connection: sqlite3.Connection, path: str, tenant: str, *, is_public: bool) -> bool:
    """Open a checkpoint to all tenants, or close it; returns False if there is none."""
    columns = {"is_public": int(is_public)}
    return CHECKPOINTS.change(connection, columns, path=path, tenant=tenant) > 0


def set_expiry(
    connection: sqlite3.Connection, path: str, tenant: str, expires_s: int | None
) -> bool:
    """Say when a checkpoint goes; None for never. Returns False if there is none."""
    columns = {"expires_s": expires_s}
    return CHECKPOINTS.change(connection, columns, path=path, tenant=tenant) > 0

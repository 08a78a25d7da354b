"""Rows of sampling sessions, and of what they sample from."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from pcg.serve.http.errors import ApiError
from pcg.serve.store.tables import Table
from pcg.serve.tinker import checkpoint_records
from pcg.serve.tinker.future_records import FUTURES
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
SAMPLERS = Table("tinker_samplers", SamplerRecord)
_OWN = "path IS NULL AND folder IS NOT NULL"


def insert(connection: sqlite3.Connection, record: SamplerRecord) -> SamplerRecord:
    """Add a sampling session, and return it; or the one that has its number already.

    Raises:
        ApiError: the client's session has too many.
    """
    there = SAMPLERS.count(connection, session=record.session)
    if there >= MOST_SAMPLERS:
        raise ApiError(429, f"The session has {there} sampling sessions; open another session.")
    SAMPLERS.insert(connection, record, "OR IGNORE")
    (session,) = SAMPLERS.select(connection, session=record.session, seq=record.seq)
    return session


def of_session(connection: sqlite3.Connection, session: str) -> list[str]:
    """Return the ids of the sampling sessions of a client's session."""
    return [id for (id,) in SAMPLERS.read(connection, "id", order="ORDER BY seq", session=session)]


MOST_EPHEMERAL = 64
"""The most sampling sessions of a client's session that have weights of their own."""


def surplus(connection: sqlite3.Connection, session: str) -> SamplerRecord | None:
    """Return the oldest sampling session with weights of its own, if there are enough of them."""
    order = f"ORDER BY id DESC LIMIT 1 OFFSET {MOST_EPHEMERAL - 1}"
    return next(iter(SAMPLERS.select(connection, _OWN, order=order, session=session)), None)


def end(connection: sqlite3.Connection, session: str) -> list[str]:
    """Remove the sampling sessions with weights of their own; returns the folders of these."""
    return [str(row.folder) for row in SAMPLERS.delete(connection, _OWN, session=session)]


def end_left(connection: sqlite3.Connection) -> None:
    """Remove those with weights of their own that a crash left of sessions which have ended."""
    condition = f"{_OWN} AND session NOT IN (SELECT id FROM tinker_sessions WHERE status = ?)"
    SAMPLERS.delete(connection, condition, (OPEN,))


def checkpoint(connection: sqlite3.Connection, path: str, tenant: str) -> tuple[str, str] | None:
    """Return the folder and the base of a checkpoint that a tenant may read; None without."""
    found = checkpoint_records.find(connection, path, tenant, int(time.time()))
    return None if found is None else (found.folder, found.base_model)


def forget_request(connection: sqlite3.Connection, future: str) -> None:
    """Drop the body of a request that is done."""
    FUTURES.change(connection, {"request": None}, id=future)


def own_folders(connection: sqlite3.Connection) -> set[str]:
    """Return the folders of weights that were saved for a sampling session alone."""
    return {str(folder) for (folder,) in SAMPLERS.read(connection, "folder", _OWN)}

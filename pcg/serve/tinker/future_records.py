"""Rows of futures: what was asked, and what came of it."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from pcg.serve.store.tables import Table

PENDING, DONE, FAILED = "pending", "done", "failed"
JSON, PROTOBUF = "application/json", "application/x-protobuf"
USER, SERVER, UNKNOWN = "user", "server", "unknown"
"""Whose fault it is that a request failed, as Tinker's clients know it."""


ROW_BYTES = 512
"""Bytes of a row and of its places in indexes, beside its texts and blobs."""


@dataclass(frozen=True)
class FutureRecord:
    """A future: a request that was acknowledged, and its result once it is there.

    Attributes:
        session: the session that asked.
        stream: the stream in which it has its place, as a model or a sampling session.
        seq: its place there; a second request of the same place is this one.
        kind: the kind of request, as `optim_step`.
        answer: JSON of what the client was told beside the id.
        request: the body, for as long as it may have to be done again.
        state: pending, done or failed.
        media_type: that of the result.
        result: the result's bytes; of one that failed the message.
        category: whose fault it is, of one that failed.
    """

    id: str
    tenant: str
    session: str
    stream: str
    seq: int
    kind: str
    answer: str
    created_s: int
    request: bytes | None
    state: str = PENDING
    media_type: str | None = None
    result: bytes | None = None
    category: str | None = None
    finished_s: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that it keeps, its row's own among them."""
        kept = len(self.answer.encode()), len(self.request or b""), len(self.result or b"")
        return ROW_BYTES + sum(kept)


FUTURES = Table("tinker_futures", FutureRecord)


def places(connection: sqlite3.Connection, stream: str, behind: int) -> list[tuple[int, str, str]]:
    """Return place, state and kind of the futures of a stream behind a place, in order."""
    columns, order = "seq, state, kind", "ORDER BY seq"
    rows = FUTURES.read(connection, columns, "seq > ?", (behind,), order, stream=stream)
    return [(seq, state, kind) for seq, state, kind in rows]


def pending(connection: sqlite3.Connection, kind: str) -> list[tuple[str, str]]:
    """Return id and tenant of the futures of a kind that are not settled."""
    rows = FUTURES.read(connection, "id, tenant", state=PENDING, kind=kind)
    return [(id, tenant) for id, tenant in rows]


def settle(
    connection: sqlite3.Connection,
    id: str,
    state: str,
    media_type: str | None,
    result: bytes,
    category: str | None,
) -> bool:
    """Note what came of a pending future; returns False if it is settled already, or gone."""
    settled: dict[str, Any] = {"state": state, "media_type": media_type, "result": result}
    settled |= {"category": category, "finished_s": int(time.time())}
    return FUTURES.change(connection, settled, id=id, state=PENDING) > 0


def fail_left(connection: sqlite3.Connection) -> None:
    """Settle what a crash left of models that are closed."""
    connection.execute(
        "UPDATE tinker_futures SET state = ?, result = ?, category = ?, finished_s = ?, "
        "request = NULL WHERE state = ? AND stream IN "
        "(SELECT id FROM tinker_models WHERE status = 'closed')",
        (FAILED, b"the model is closed", USER, int(time.time()), PENDING),
    )


def used(connection: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """Return the number of pending futures, and the bytes of all, of each tenant."""
    rows = connection.execute(
        "SELECT tenant, SUM(state = 'pending'), SUM(? + LENGTH(answer) + "
        "COALESCE(LENGTH(request), 0) + COALESCE(LENGTH(result), 0)) "
        "FROM tinker_futures GROUP BY tenant",
        (ROW_BYTES,),
    )
    return {tenant: (count, size) for tenant, count, size in rows}


def forget_requests(connection: sqlite3.Connection, stream: str, first: int, last: int) -> None:
    """Drop the bodies of the settled requests of a stream between two places, both included."""
    condition = "seq BETWEEN ? AND ? AND state <> ?"
    FUTURES.change(connection, {"request": None}, condition, (first, last, PENDING), stream=stream)


def expire(connection: sqlite3.Connection, before_s: int) -> None:
    """Remove the futures that were settled before a time, and need not be done again."""
    connection.execute(
        "DELETE FROM tinker_futures WHERE finished_s < ? AND state IN (?, ?) AND request IS NULL",
        (before_s, DONE, FAILED),
    )

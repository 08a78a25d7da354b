"""Rows of custom losses: graphs that the clients of a session made, by their numbers there."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import msgspec

from pcg.runtime.training.loss_graph import LossGraph
from pcg.serve.http.errors import ApiError
from pcg.serve.store.tables import Table
from pcg.serve.tinker.session_records import OPEN

MOST_OF_SESSION = 64
MOST_OF_TENANT = 1024
"""The most custom losses of a session, and of a tenant."""


@dataclass(frozen=True)
class LossRecord:
    """A custom loss.

    Attributes:
        session: the session whose models may be trained by it.
        seq: its number there.
        graph: JSON of its `LossGraph`, which was checked.
    """

    id: str
    tenant: str
    session: str
    seq: int
    graph: str
    created_s: int

    @property
    def loss(self) -> LossGraph:
        """The graph."""
        return msgspec.json.decode(self.graph, type=LossGraph)


LOSSES = Table("tinker_losses", LossRecord)


def insert(connection: sqlite3.Connection, record: LossRecord) -> None:
    """Add a loss; those of sessions that have ended go. ApiError: there are too many."""
    connection.execute(
        "DELETE FROM tinker_losses WHERE tenant = ? AND session NOT IN "
        "(SELECT id FROM tinker_sessions WHERE tenant = ? AND status = ?)",
        (record.tenant, record.tenant, OPEN),
    )
    for of, value, most in (
        ("session", record.session, MOST_OF_SESSION),
        ("tenant", record.tenant, MOST_OF_TENANT),
    ):
        count = LOSSES.count(connection, **{of: value})
        if count >= most:
            raise ApiError(
                400,
                f"Your {of} has {count} custom losses, and {most} are the most; use one of them.",
                code="too_many_losses",
            )
    LOSSES.insert(connection, record)

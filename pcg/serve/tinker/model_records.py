"""Rows of models that are trained: what each is, and how far its state is kept."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import astuple, dataclass, fields

from pcg.serve.engine.trainer_orders import LoraOrder

OPEN, CLOSED = "open", "closed"
COPIES = "copy-"
"""The beginning of sessions that are none: each has a model that is a copy of a checkpoint."""


@dataclass(frozen=True)
class ModelRecord:
    """A model that a session trains.

    Attributes:
        id: `SESSION:train:SEQ`, which is its stream's name, too.
        seq: its number in the session.
        lora: JSON of its `LoraOrder`.
        asked_s: when something was last asked of it.
        status: open, or closed once nothing more can be asked of it.
        state: the folder of the last state that is kept, relative to the store's.
        state_seq: the last request that is in that state; -1 for the one that made it.
        done_seq: the request up to which all are settled.
    """

    id: str
    tenant: str
    session: str
    seq: int
    base_model: str
    lora: str
    user_metadata: str | None
    created_s: int
    asked_s: int
    status: str = OPEN
    state: str | None = None
    state_seq: int = -1
    done_seq: int = -1

    @property
    def order(self) -> LoraOrder:
        """The LoRA that its trainer is made of."""
        return lora_of(self.lora)


def lora_of(text: str) -> LoraOrder:
    """Return the LoRA that a row has as JSON."""
    return LoraOrder(**json.loads(text))


_COLUMNS = ", ".join(field.name for field in fields(ModelRecord))


def insert(connection: sqlite3.Connection, record: ModelRecord) -> None:
    """Add a model."""
    values = astuple(record)
    places = ", ".join("?" for _ in values)
    connection.execute(f"INSERT INTO tinker_models ({_COLUMNS}) VALUES ({places})", values)


def find(connection: sqlite3.Connection, id: str, tenant: str) -> ModelRecord | None:
    """Return a tenant's model; None without."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM tinker_models WHERE id = ? AND tenant = ?", (id, tenant)
    ).fetchone()
    return None if row is None else ModelRecord(*row)


def all_open(connection: sqlite3.Connection) -> list[ModelRecord]:
    """Return the open models of all tenants."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM tinker_models WHERE status = ? ORDER BY id", (OPEN,)
    )
    return [ModelRecord(*row) for row in rows]


def count_open(connection: sqlite3.Connection, tenant: str) -> int:
    """Count a tenant's open models."""
    found = connection.execute(
        "SELECT COUNT(*) FROM tinker_models WHERE tenant = ? AND status = ?", (tenant, OPEN)
    )
    return int(found.fetchone()[0])


def change(connection: sqlite3.Connection, id: str, **columns: str | int | None) -> None:
    """Change columns of a model."""
    assigned = ", ".join(f"{name} = ?" for name in columns)
    connection.execute(f"UPDATE tinker_models SET {assigned} WHERE id = ?", (*columns.values(), id))


def states(connection: sqlite3.Connection) -> set[str]:
    """Return the folders of states that rows name."""
    rows = connection.execute("SELECT state FROM tinker_models WHERE state IS NOT NULL")
    return {str(row[0]) for row in rows}

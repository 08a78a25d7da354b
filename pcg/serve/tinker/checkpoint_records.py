"""Rows of checkpoints: states and weights that a client saved, by their paths."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass

from pcg.errors import FinetuneError
from pcg.runtime.engine.commands import LoraOrder
from pcg.serve.store.tables import Table
from pcg.serve.tinker.model_records import lora_of

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
"""The kinds, as paths have them: a whole state, an adapter to sample by, one for others to load."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint.

    Attributes:
        path: `tinker://MODEL/KIND/NAME`.
        model: the model that it was saved of.
        folder: its files, relative to the store's folder.
        lora: JSON of the model's `LoraOrder`.
        is_public: 1 if every tenant may load it.
    """

    path: str
    tenant: str
    model: str
    kind: str
    name: str
    folder: str
    base_model: str
    lora: str
    user_metadata: str | None
    size_bytes: int
    created_s: int
    expires_s: int | None
    is_public: int = 0

    @property
    def order(self) -> LoraOrder:
        """The LoRA that a trainer of it is made of."""
        return lora_of(self.lora)


CHECKPOINTS = Table("tinker_checkpoints", CheckpointRecord)
LIVES = "(expires_s IS NULL OR expires_s > ?)"


def path_of(model: str, kind: str, name: str) -> str:
    """Return the path of a checkpoint. FinetuneError: the name cannot be one."""
    if not _NAME.fullmatch(name):
        raise FinetuneError(
            f"{name[:128]!r} cannot name a checkpoint; use 1 to 128 letters, digits, dots, - and "
            "_, and a letter or a digit first"
        )
    return f"tinker://{model}/{kind}/{name}"


def insert(connection: sqlite3.Connection, record: CheckpointRecord) -> None:
    """Add a checkpoint, or put it in the place of the one that has its path."""
    CHECKPOINTS.insert(connection, record, "OR REPLACE")


def find(
    connection: sqlite3.Connection, path: str, tenant: str, now_s: int
) -> CheckpointRecord | None:
    """Return a checkpoint that a tenant may load: its own, or a public one; None without."""
    condition = f"(tenant = ? OR is_public) AND {LIVES}"
    return CHECKPOINTS.find(connection, condition, (tenant, now_s), path=path)


def last(connection: sqlite3.Connection, model: str) -> str | None:
    """Return the path of the last state that was saved of a model, or None."""
    latest = "ORDER BY created_s DESC, rowid DESC LIMIT 1"
    rows = CHECKPOINTS.read(connection, "path", order=latest, model=model, kind=WEIGHTS)
    return str(rows[0][0]) if rows else None


def used(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
    """Return the number of a tenant's checkpoints, and the bytes of all weights that it saved."""
    sizes = "COUNT(*), COALESCE(SUM(size_bytes), 0)"
    (row,) = CHECKPOINTS.read(connection, sizes, tenant=tenant)
    (own,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes), 0) FROM tinker_samplers WHERE tenant = ?", (tenant,)
    ).fetchone()
    return int(row[0]), int(row[1]) + int(own)


def expire(connection: sqlite3.Connection, now_s: int) -> list[str]:
    """Remove what has expired; returns the folders."""
    return [row.folder for row in CHECKPOINTS.delete(connection, "expires_s <= ?", (now_s,))]


def folders(connection: sqlite3.Connection) -> set[str]:
    """Return the folders that rows name."""
    return {str(folder) for (folder,) in CHECKPOINTS.read(connection, "folder")}

"""Typed tables with dataclass rows; and the data that jobs hold on disk."""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeAlias, TypeVar

# ---------------------------------------------------------------------------------------------- ids


_RANDOM_BYTES = 10

_lock = threading.Lock()
_last_ms = 0


def now() -> int:
    """Return the time, Unix seconds."""
    return int(time.time())


def new_key(prefix: str) -> str:
    """Return an unguessable id with a prefix; ids sort by creation."""
    global _last_ms
    with _lock:
        _last_ms = max(_last_ms + 1, time.time_ns() // 1_000_000)
        return f"{prefix}{_last_ms:012x}{secrets.token_hex(_RANDOM_BYTES)}"


# -------------------------------------------------------------------------------------------- table


Row = TypeVar("Row")
Cell: TypeAlias = str | int | bytes | None


class Table(Generic[Row]):
    """A table of the database; rows are read and written as a dataclass.

    A condition is SQL with a `?` for each of `values`; keyword arguments are columns and their
    values.
    """

    def __init__(self, name: str, row: type[Row]) -> None:
        self.name = name
        self._row = row
        self._names = [field.name for field in fields(row)]  # type: ignore[arg-type]
        self.columns = ", ".join(self._names)

    def insert(self, connection: sqlite3.Connection, /, row: Row, otherwise: str = "") -> None:
        """Add a row; `otherwise`, OR REPLACE or OR IGNORE, applies if its key exists."""
        places = ", ".join("?" for _ in self._names)
        connection.execute(
            f"INSERT {otherwise} INTO {self.name} ({self.columns}) VALUES ({places})",
            [getattr(row, name) for name in self._names],
        )

    def find(
        self,
        connection: sqlite3.Connection,
        /,
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> Row | None:
        """Return the first matching row, or None."""
        return next(iter(self.select(connection, condition, values, "", **equal)), None)

    def select(
        self,
        connection: sqlite3.Connection,
        /,
        condition: str = "1",
        values: Sequence[Any] = (),
        order: str = "",
        **equal: Cell,
    ) -> list[Row]:
        """Return the matching rows; `order` is the end of the statement."""
        rows = self.read(connection, self.columns, condition, values, order, **equal)
        return [self._row(*row) for row in rows]

    def read(
        self,
        connection: sqlite3.Connection,
        /,
        columns: str,
        condition: str = "1",
        values: Sequence[Any] = (),
        order: str = "",
        **equal: Cell,
    ) -> list[tuple[Any, ...]]:
        """Return some columns, or aggregates of columns, of the matching rows."""
        where, bound = _where(condition, values, equal)
        query = f"SELECT {columns} FROM {self.name} WHERE {where} {order}"
        return [tuple(row) for row in connection.execute(query, bound)]

    def count(
        self,
        connection: sqlite3.Connection,
        /,
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> int:
        return int(self.read(connection, "COUNT(*)", condition, values, "", **equal)[0][0])

    def change(
        self,
        connection: sqlite3.Connection,
        /,
        columns: Mapping[str, Any],
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> int:
        """Set columns of the matching rows. Return their number."""
        where, bound = _where(condition, values, equal)
        assigned = ", ".join(f"{name} = ?" for name in columns)
        query = f"UPDATE {self.name} SET {assigned} WHERE {where}"
        return connection.execute(query, (*columns.values(), *bound)).rowcount

    def delete(
        self,
        connection: sqlite3.Connection,
        /,
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> list[Row]:
        """Remove the matching rows, and return them."""
        where, bound = _where(condition, values, equal)
        query = f"DELETE FROM {self.name} WHERE {where} RETURNING {self.columns}"
        return [self._row(*row) for row in connection.execute(query, bound).fetchall()]


def _where(
    condition: str, values: Sequence[Any], equal: Mapping[str, Cell]
) -> tuple[str, list[Any]]:
    conditions = [f"({condition})", *(f"{name} = ?" for name in equal)]
    return " AND ".join(conditions), [*values, *equal.values()]


# ----------------------------------------------------------------------------------------- holdings

# A tenant's quota includes the data of its unfinished jobs, even if the files were deleted; the
# checkpoints and adapters in all folders of its jobs; and the configurations in the jobs' rows,
# which may contain graders.


def data_name(index: int) -> str:
    """Return the name of a file of a job's data: the training data, then the validation data."""
    names = ("training.jsonl", "validation.jsonl")
    return names[index] if index < len(names) else f"validation-{index}.jsonl"


def hold_data(
    connection: sqlite3.Connection, job: str, tenant: str, data: Iterable[tuple[str, int]]
) -> None:
    """Record the data of a new job, by digest and size."""
    rows = [(job, tenant, digest, size) for digest, size in data]
    connection.executemany(
        "INSERT INTO job_data (job, tenant, digest, size_bytes) VALUES (?, ?, ?, ?)", rows
    )


def release_data(connection: sqlite3.Connection, job: str) -> None:
    """Record that the data of a job was removed from its folder."""
    connection.execute("DELETE FROM job_data WHERE job = ?", (job,))


def held_data(connection: sqlite3.Connection, job: str) -> set[str]:
    """Return the digests of the data in a job's folder."""
    rows = connection.execute("SELECT digest FROM job_data WHERE job = ?", (job,))
    return {digest for (digest,) in rows}


def jobs_with_data(connection: sqlite3.Connection) -> set[str]:
    """Return the jobs that have data in their folders."""
    return {job for (job,) in connection.execute("SELECT DISTINCT job FROM job_data")}


def hold_folder(connection: sqlite3.Connection, job: str, tenant: str, size_bytes: int) -> None:
    """Record the bytes of the adapters and checkpoints in a job's folder; 0 for none."""
    connection.execute("DELETE FROM job_folders WHERE job = ?", (job,))
    if size_bytes:
        connection.execute(
            "INSERT INTO job_folders (job, tenant, size_bytes) VALUES (?, ?, ?)",
            (job, tenant, size_bytes),
        )


def resize_folder(connection: sqlite3.Connection, job: str, size_bytes: int) -> None:
    """Update the bytes in a job's folder, if a row of it exists; 0 for none."""
    connection.execute("UPDATE job_folders SET size_bytes = ?2 WHERE job = ?1", (job, size_bytes))
    connection.execute("DELETE FROM job_folders WHERE job = ? AND size_bytes = 0", (job,))


def held_folders(connection: sqlite3.Connection) -> set[str]:
    """Return the jobs, with or without a row, whose folders hold adapters or checkpoints."""
    return {job for (job,) in connection.execute("SELECT job FROM job_folders")}


def held_bytes(connection: sqlite3.Connection, tenant: str, now_s: int) -> int:
    """Count the bytes that a tenant's jobs hold, without data that is also the tenant's file.

    Data of several jobs counts once.
    """
    (data,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes), 0) FROM (SELECT DISTINCT digest, size_bytes "
        "FROM job_data WHERE tenant = ?1 AND digest NOT IN (SELECT digest FROM files "
        "WHERE tenant = ?1 AND (expires_s IS NULL OR expires_s > ?2)))",
        (tenant, now_s),
    ).fetchone()
    (in_folders,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes), 0) FROM job_folders WHERE tenant = ?", (tenant,)
    ).fetchone()
    (in_rows,) = connection.execute(
        "SELECT COALESCE(SUM(config_bytes), 0) FROM jobs WHERE tenant = ?", (tenant,)
    ).fetchone()
    return int(data) + int(in_folders) + int(in_rows)

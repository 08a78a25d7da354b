"""Tables whose columns are the fields of a dataclass."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeAlias, TypeVar

Row = TypeVar("Row")
Cell: TypeAlias = str | int | bytes | None


class Table(Generic[Row]):
    """A table of the database; rows are read and written as a dataclass.

    Conditions are SQL with `?` for each of `values`; keyword arguments are columns that are equal.
    """

    def __init__(self, name: str, row: type[Row]) -> None:
        self.name = name
        self._row = row
        self._names = [field.name for field in fields(row)]  # type: ignore[arg-type]
        self.columns = ", ".join(self._names)

    def insert(self, connection: sqlite3.Connection, row: Row, otherwise: str = "") -> None:
        """Add a row; `otherwise` is OR REPLACE or OR IGNORE where one has its key."""
        places = ", ".join("?" for _ in self._names)
        connection.execute(
            f"INSERT {otherwise} INTO {self.name} ({self.columns}) VALUES ({places})",
            [getattr(row, name) for name in self._names],
        )

    def find(
        self,
        connection: sqlite3.Connection,
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> Row | None:
        """Return the first row that fits; None without."""
        return next(iter(self.select(connection, condition, values, "", **equal)), None)

    def select(
        self,
        connection: sqlite3.Connection,
        condition: str = "1",
        values: Sequence[Any] = (),
        order: str = "",
        **equal: Cell,
    ) -> list[Row]:
        """Return the rows that fit; `order` is the end of the statement."""
        rows = self.read(connection, self.columns, condition, values, order, **equal)
        return [self._row(*row) for row in rows]

    def read(
        self,
        connection: sqlite3.Connection,
        columns: str,
        condition: str = "1",
        values: Sequence[Any] = (),
        order: str = "",
        **equal: Cell,
    ) -> list[tuple[Any, ...]]:
        """Return some columns, or aggregates of them, of the rows that fit."""
        where, given = _where(condition, values, equal)
        query = f"SELECT {columns} FROM {self.name} WHERE {where} {order}"
        return [tuple(row) for row in connection.execute(query, given)]

    def count(
        self,
        connection: sqlite3.Connection,
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> int:
        """Count the rows that fit."""
        return int(self.read(connection, "COUNT(*)", condition, values, "", **equal)[0][0])

    def change(
        self,
        connection: sqlite3.Connection,
        columns: Mapping[str, Any],
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> int:
        """Set columns of the rows that fit; returns their number."""
        where, given = _where(condition, values, equal)
        assigned = ", ".join(f"{name} = ?" for name in columns)
        query = f"UPDATE {self.name} SET {assigned} WHERE {where}"
        return connection.execute(query, (*columns.values(), *given)).rowcount

    def delete(
        self,
        connection: sqlite3.Connection,
        condition: str = "1",
        values: Sequence[Any] = (),
        **equal: Cell,
    ) -> list[Row]:
        """Remove the rows that fit, and return them."""
        where, given = _where(condition, values, equal)
        query = f"DELETE FROM {self.name} WHERE {where} RETURNING {self.columns}"
        return [self._row(*row) for row in connection.execute(query, given).fetchall()]


def _where(
    condition: str, values: Sequence[Any], equal: Mapping[str, Cell]
) -> tuple[str, list[Any]]:
    conditions = [f"({condition})", *(f"{name} = ?" for name in equal)]
    return " AND ".join(conditions), [*values, *equal.values()]

"""Stand-ins that do what the datasets, frames and tables of datasets, pandas and others do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Stored:
    """A dataset of `datasets`: it iterates over its rows."""

    def __init__(self, rows: list[Any], column_names: Sequence[str] | None = None) -> None:
        self._rows = rows
        self.column_names = column_names or list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


class Splits(dict[str, Stored]):
    """A DatasetDict; it has `column_names`, too."""

    @property
    def column_names(self) -> dict[str, Sequence[str]]:
        return {name: each.column_names for name, each in self.items()}


class Array:
    """An array of numpy, as a cell of a frame that was read from a file."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def tolist(self) -> list[Any]:
        return self._values


class Frame:
    """A frame of pandas: it iterates over the names of its columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str = "dict") -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


class PolarsFrame(Frame):
    """A frame of polars: it iterates over its columns."""

    def to_dict(self, *, as_series: bool = True) -> list[dict[str, Any]]:  # type: ignore[override]
        raise AssertionError(as_series)

    def to_dicts(self) -> list[dict[str, Any]]:
        return self._rows


class ArrowTable:
    """A table of pyarrow: its `columns` are arrays."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.column_names = list(rows[0])
        self.columns = [[row[name] for row in rows] for name in rows[0]]

    def to_pylist(self) -> list[dict[str, Any]]:
        return self._rows

"""Limits of the data of a job, so that one job cannot take the memory and the time of others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields

from pcg.errors import DataError
from pcg.units import shown


@dataclass(frozen=True)
class DataLimits:
    """The most data of one job, and the most jobs that are prepared at the same time.

    Training and evaluation data are counted separately.

    Attributes:
        rows: rows of the data.
        row_bytes: bytes of a row: those of its line in a file, or of all texts of a row in memory.
            A plain text file is no row, and only bounded by `total_bytes`.
        total_bytes: bytes of all rows together.
        tokens: tokens of a row, before it is cut to its maximum length.
        at_once: jobs with data that is tokenized at the same time, each in its own process; others
            wait.
        waiting: jobs that are prepared or wait for it; more are refused.
    Raises:
        DataError: a limit is less than 1.
    """

    rows: int = 1_000_000
    row_bytes: int = 16 * 2**20
    total_bytes: int = 512 * 2**20
    tokens: int = 2**20
    at_once: int = 2
    waiting: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise DataError(
                    f"{field.name}={shown(value)} of DataLimits; use an int of at least 1"
                )


UNLIMITED = DataLimits(*(sys.maxsize for _ in fields(DataLimits)))
"""No limits: of data that its owner reads."""


class RowMeter:
    """Counts rows and their bytes, and refuses data beyond the limits."""

    def __init__(self, limits: DataLimits) -> None:
        self.limits = limits
        self._rows = 0
        self._bytes = 0

    def add(self, size_bytes: int, where: str, is_document: bool = False) -> None:
        """Count a row. DataError: it is too large, or there are too many; `where` names it."""
        limits = self.limits
        self._rows += 1
        self._bytes += size_bytes
        if self._rows > limits.rows:
            raise DataError(
                f"{where} is row {self._rows:,}, and a job here takes {limits.rows:,} rows; give "
                "fewer, or have the engine's DataLimits(rows=…) raised"
            )
        if size_bytes > limits.row_bytes and not is_document:
            raise DataError(
                f"{where} has more than {limits.row_bytes:,} bytes, the most of a row here; split "
                "it, or have the engine's DataLimits(row_bytes=…) raised"
            )
        if self._bytes > limits.total_bytes:
            raise DataError(
                f"with {where} the data has more than {limits.total_bytes:,} bytes, the most of a "
                "job here; give less, or have the engine's DataLimits(total_bytes=…) raised"
            )


def check_tokens(count: int, where: str, limits: DataLimits) -> None:
    """Refuse a row with too many tokens. DataError: names it."""
    if count > limits.tokens:
        raise DataError(
            f"{where} has {count:,} tokens, and a row here may have {limits.tokens:,}; split it, "
            "or have the engine's DataLimits(tokens=…) raised"
        )


_ITEM_BYTES = 8
"""Bytes that a value other than a text counts, so that no row is for nothing."""


def bytes_of(row: object, most: int = sys.maxsize) -> int:
    """Return the bytes of the texts and values in a row in memory; beyond `most`, some of them."""
    total, left = 0, [row]
    while left and total <= most:
        value = left.pop()
        total += _ITEM_BYTES
        if isinstance(value, str):
            total += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return total

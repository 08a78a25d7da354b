"""How much a finetuning step may keep for backward."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pcg.errors import UnsupportedError

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 10 ** (3 * (i + 1)) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}iB": 2 ** (10 * (i + 1)) for i, prefix in enumerate("KMGT")},
}


@dataclass(frozen=True)
class MemoryBudget:
    """A share of what could be saved, or bytes.

    Attributes:
        share: 1 keeps all that spares a matrix product, 0 the least; between, bytes are as far
            between those two. None where `size_bytes` says it.
        size_bytes: kept for backward at most, by a step of `batch` sequences of `seq` tokens. None
            where `share` says it.
        batch: sequences of a step that the plan is made for.
        seq: tokens of each.
    """

    share: float | None = 1.0
    size_bytes: int | None = None
    batch: int = 1
    seq: int = 1024

    def __post_init__(self) -> None:
        for name, number in (("batch", self.batch), ("seq", self.seq)):
            if type(number) is not int or number < 1:
                raise UnsupportedError(f"{name}={number!r}; use an int of at least 1")
        if (self.share is None) == (self.size_bytes is None):
            raise UnsupportedError("a memory budget is either a share or a number of bytes")

    @classmethod
    def parse(cls, value: object, batch: int = 1, seq: int = 1024) -> MemoryBudget:
        """The budget that a user writes: None (1), 0 to 1, bytes above 1, "0.3" or "8GiB".

        Raises:
            UnsupportedError: it is none of these.
        """
        if value is None:
            return cls(batch=batch, seq=seq)
        number = _bytes(value) if isinstance(value, str) else value
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise _refused(value)
        if not math.isfinite(number) or number < 0:
            raise _refused(value)
        if number <= 1 and not (isinstance(value, str) and value.rstrip().endswith("B")):
            return cls(float(number), None, batch, seq)
        if number != int(number):
            raise _refused(value)
        return cls(None, int(number), batch, seq)

    def __str__(self) -> str:
        return f"{self.share:g}" if self.share is not None else f"{self.size_bytes} bytes"


def _bytes(text: str) -> float:
    """A number, with the unit of bytes that stands behind it."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or (found[2] and found[2] not in _UNITS):
        raise _refused(text)
    try:
        number = float(found[1])
    except ValueError as error:
        raise _refused(text) from error
    return float(int(number * _UNITS[found[2]])) if found[2] else number


def _refused(value: object) -> UnsupportedError:
    return UnsupportedError(
        f"memory_budget={value!r}; use a number from 0 (least memory) to 1 (no matrix product made "
        "again), or bytes such as '8GiB'"
    )

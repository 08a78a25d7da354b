"""Conversions between numbers with units and text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_BYTES = {
    "B": 1,
    **{f"{prefix}B": 10 ** (3 * (i + 1)) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}iB": 2 ** (10 * (i + 1)) for i, prefix in enumerate("KMGT")},
}


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a text such as `8GiB` or `500 MB`; None if it is no size with a unit."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([A-Za-z]+)\s*", text)
    if match is None or match[3] not in _BYTES:
        return None
    return int(float(match[1] + (match[2] or "")) * _BYTES[match[3]])


def size_text(size_bytes: float) -> str:
    """Format a size for people: 1.5 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size_bytes >= 1024 and len(units) > 1:
        size_bytes /= 1024
        del units[0]
    return f"{size_bytes:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def gib(size_bytes: int) -> str:
    """Format bytes in GiB, without the unit; small values with two more digits."""
    size = size_bytes / 2**30
    return "0" if not size_bytes else f"{size:,.{2 if size >= 0.01 else 4}f}"


def duration_text(seconds: float) -> str:
    """Format a duration for people: 250 ms, 3.2 s, 4 min 10 s."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rounded(number: int) -> str:
    """Format a large number for people: 8.03 B, 41.9 M."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:,.{2 if number < 100 * size else 1}f}{unit}"
    return f"{number}"


def counted(number: int, noun: str) -> str:
    """Format a number of things: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges: `0-3, 5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def shown(value: object, most: int = 80) -> str:
    """Format a value for an error message, cut to `most` characters; its repr may fail."""
    try:
        text = repr(value)
    except Exception:  # an int of more than 4,300 digits, a recursive list, a faulty __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number within the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

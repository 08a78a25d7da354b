"""Numbers with units as text, and text with units as numbers."""

from __future__ import annotations

import re

_BYTES = {
    "B": 1,
    **{f"{prefix}B": 10 ** (3 * (i + 1)) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}iB": 2 ** (10 * (i + 1)) for i, prefix in enumerate("KMGT")},
}


def parse_bytes(text: str) -> int | None:
    """The bytes that a text such as `8GiB` or `500 MB` names; None if it is no size with a unit."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([A-Za-z]+)\s*", text)
    if found is None or found[3] not in _BYTES:
        return None
    return int(float(found[1] + (found[2] or "")) * _BYTES[found[3]])

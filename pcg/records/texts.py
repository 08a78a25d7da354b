"""Values of a record as text."""

from __future__ import annotations

import datetime

_LONGEST_TEXT = 2000


def text_of(value: object) -> str:
    """Return a value as a table has it, cut where it is long."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        value = ", ".join(map(text_of, value))
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def time_text(seconds: float) -> str:
    """Return a time of Unix as a date, in UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "–"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")

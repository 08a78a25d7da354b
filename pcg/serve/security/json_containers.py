"""The lists and objects in a body, which are counted before it is parsed.

Each is an object of Python's that its garbage collector goes through again and again while others
are made: a body of 4 MiB with a million of them held the interpreter's lock for two seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_CONTAINERS = 2**16
"""More than a body can have whose lists are within their bounds (`pcg.serve.openai`)."""


def has_too_many(parts: Sequence[bytes]) -> bool:
    """Return True if the JSON text in the parts of a body has too many lists and objects."""
    if _brackets(parts) <= MOST_CONTAINERS:  # as nearly always: at most so many in texts, too
        return False
    # Without escapes every second piece between quotation marks is within a text.
    plain = b"".join(parts).replace(rb"\\", b"").replace(rb"\"", b"")
    return _brackets([b"".join(plain.split(b'"')[::2])]) > MOST_CONTAINERS


def _brackets(parts: Sequence[bytes]) -> int:
    return sum(part.count(b"[") + part.count(b"{") for part in parts)

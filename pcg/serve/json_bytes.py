"""JSON as it is sent.

Its texts have none of the characters at which some clients end a line of a stream though the
format has two ends of lines alone: those that `str.splitlines` knows, with which httpx and others
read server-sent events. JSON writes the others of them with escapes anyway.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

_LINE_ENDS = {
    "\x85".encode(): rb"\u0085",
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
}


def json_bytes(content: Any) -> bytes:
    """Return JSON; half a character that a client sent is sent back escaped, as it came."""
    try:
        found = orjson.dumps(content)
    except orjson.JSONEncodeError:
        return json.dumps(_finite(content), separators=(",", ":")).encode()
    if b"\xe2\x80" in found or b"\xc2\x85" in found:
        for character, escape in _LINE_ENDS.items():
            found = found.replace(character, escape)
    return found


def _finite(value: Any) -> Any:
    """Return a value with None for infinite numbers and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

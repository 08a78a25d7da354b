"""JSON as it is sent."""

from __future__ import annotations

import json
from typing import Any

import orjson


def json_bytes(content: Any) -> bytes:
    """Return JSON; half a character that a client sent is sent back escaped, as it came."""
    try:
        return orjson.dumps(content)
    except orjson.JSONEncodeError:
        return json.dumps(content, separators=(",", ":")).encode()

"""Bodies of requests and replies: JSON, strict pydantic models, and ids.

The JSON escapes the characters at which `str.splitlines` ends a line: httpx and other clients split
server-sent events there, although the format has only two line ends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import secrets
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

_LINE_ENDS = {
    "\x85".encode(): rb"\u0085",
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
}


def json_bytes(content: Any) -> bytes:
    """Return JSON; an unpaired surrogate from a client is sent back escaped."""
    try:
        encoded = orjson.dumps(content)
    except orjson.JSONEncodeError:
        return json.dumps(_finite(content), separators=(",", ":")).encode()
    if b"\xe2\x80" in encoded or b"\xc2\x85" in encoded:
        for character, escape in _LINE_ENDS.items():
            encoded = encoded.replace(character, escape)
    return encoded


def _finite(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_id(prefix: str) -> str:
    """Return a new id with a prefix, such as cmpl-3f…."""
    return f"{prefix}-{secrets.token_hex(16)}"


MOST_FIELDS = 256
"""The most fields of an object with named fields."""
MOST_ENTRIES = 4096
"""The most entries of a map with the client's keys, such as `logit_bias`."""


def _end_lists_early(schema: Any) -> None:
    """Set the validation of lists to stop at the first error.

    Args:
        schema: a part of pydantic's schema; it is modified.
    """
    if isinstance(schema, list | tuple):
        for part in schema:
            _end_lists_early(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_lists_early(part)


class WireModel(BaseModel):
    """A body or a part of it: unknown fields are refused, and types are not converted.

    As in JSON schema, 2.0 is an integer. Validation of a list stops at its first wrong entry, and
    the number of fields is limited: millions of errors would take seconds, and memory.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_lists_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_FIELDS:
            raise ValueError(f"an object has {len(data)} fields; use at most {MOST_FIELDS}")
        for name, value in data.items():
            if type(value) is dict and len(value) > MOST_ENTRIES:
                raise ValueError(f"{name} has {len(value)} entries; use at most {MOST_ENTRIES}")
        return {name: _whole(value, 2) for name, value in data.items()}


def _whole(value: Any, depth: int) -> Any:
    """Convert integral floats to ints, also in lists.

    Args:
        depth: nesting depth of lists to convert; no field has more than two.
    """
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if depth and type(value) is list and not _kinds(value).isdisjoint((float, list)):
        return [_whole(item, depth - 1) for item in value]
    return value


def _kinds(values: list[Any]) -> set[type]:
    """Return the types of a list's entries, which may be millions."""
    return set(map(type, values))


# ------------------------------------------------------------------------------------------- pages


def page_headers(page: str, *, is_live: bool = False) -> dict[str, str]:
    """Return the headers of a page; only the page's script may run.

    Args:
        is_live: True if the page has a style, allowed by its hash, and sends requests to this
            server.
    """
    policy = {
        "default-src": "'none'",
        "script-src": _source_of(page, "script"),
        "style-src": _source_of(page, "style") if is_live else "'unsafe-inline'",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cache-control": "no-cache",
    }


def _source_of(page: str, tag: str) -> str:
    """Return the policy's source of the page's script or style: its hash."""
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"

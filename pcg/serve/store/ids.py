"""Ids of what is kept: those that are made later are greater, as texts."""

from __future__ import annotations

import secrets
import threading
import time

_RANDOM_BYTES = 10

_lock = threading.Lock()
_last_ms = 0


def new_key(prefix: str) -> str:
    """Return a new id that begins with a prefix, and that nobody can guess."""
    global _last_ms
    with _lock:
        _last_ms = max(_last_ms + 1, time.time_ns() // 1_000_000)
        return f"{prefix}{_last_ms:012x}{secrets.token_hex(_RANDOM_BYTES)}"

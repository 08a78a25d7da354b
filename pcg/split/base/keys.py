"""The keys that a base's clients need, and what each allows."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import TypeAlias

SERVE, TRAIN = "infer", "train"
"""What a key may allow: pieces where a user waits for tokens, and those of training."""
KeyCheck: TypeAlias = Callable[[str], frozenset[str] | None]
"""What a key allows; None if it is no key of the base."""


def keys_of(keys: Sequence[str]) -> KeyCheck:
    """Return the check of a few keys that allow all; without any, everyone may do all."""
    digests = [_digest_of(key) for key in keys]
    everything = frozenset((SERVE, TRAIN))

    def allowed(key: str) -> frozenset[str] | None:
        digest = _digest_of(key)
        # All are compared, in a time that does not depend on where they differ.
        found = sum(hmac.compare_digest(one, digest) for one in digests)
        return everything if found or not digests else None

    return allowed


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

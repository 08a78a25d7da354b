"""API keys with scopes and tenants. Servers and base executors store only hashes of keys.

A file of keys is a JSON list; `printf %s KEY | sha256sum` prints a hash:

    [{"name": "ci", "sha256": "9f86d0…", "scopes": ["infer", "train"], "tenant": "research"}]

A tenant owns adapters, files and jobs. It is the key's name by default; several keys may have the
same tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pcg.errors import ServeError
from pcg.files import json_value, read_bytes, shown_path
from pcg.units import shown

_FIELDS = {"name", "sha256", "scopes", "tenant"}
VARIABLE = "PCG_API_KEY"
"""Environment variable with a key."""
_SHORTEST = 8
"""Minimum characters of a key; a shorter key can be guessed."""


class Scope(StrEnum):
    """A permission of a key; `metrics` allows reading /metrics, which `admin` allows, too."""

    INFER = "infer"
    TRAIN = "train"
    ADMIN = "admin"
    METRICS = "metrics"


@dataclass(frozen=True)
class Key:
    """A key, stored as its hash.

    Attributes:
        name: its name in logs and metrics.
        digest: the key's SHA-256.
        tenant: owner of the objects created with the key.
    """

    name: str
    digest: bytes
    scopes: frozenset[Scope]
    tenant: str


class Keys:
    """The keys of a server."""

    def __init__(self, keys: Sequence[Key]) -> None:
        names = [key.name for key in keys]
        for name in names:
            if names.count(name) > 1:
                raise ServeError(f"two keys have the name {name!r}; give each key its own name")
        by_digest: dict[bytes, str] = {}
        for key in keys:
            other = by_digest.setdefault(key.digest, key.name)
            if other != key.name:
                raise ServeError(
                    f"the keys {other!r} and {key.name!r} have the same value, so their requests "
                    "cannot be told apart; change or remove one of them"
                )
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    @property
    def tenants(self) -> int:
        return len({key.tenant for key in self._keys})

    def become(self, others: Keys) -> None:
        """Replace the keys in place, for all holders of this object."""
        self._keys = others._keys

    def find(self, sent: str) -> Key | None:
        """Return the key that a client sent, or None.

        The time does not depend on the position of the first differing byte.
        """
        digest = digest_of(sent)
        match = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match


def digest_of(key: str) -> bytes:
    """Return the hash of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def open_keys(sent: Sequence[str], file: Path | None) -> tuple[Keys, str | None]:
    """Create the keys of a server.

    Args:
        sent: keys with all scopes, of the tenant `default`; by default the environment's
            PCG_API_KEY, which other processes cannot see.
        file: a file of further keys.
    Returns:
        The keys, and the generated key if none was given.
    Raises:
        ServeError: a key is too short, or the file is damaged.
    """
    created = None
    environment = os.environ.get(VARIABLE)
    if environment and not sent:
        sent = (environment,)
    if not sent and file is None:
        created = f"pcg-{secrets.token_urlsafe(24)}"
        sent = (created,)
    for key in sent:
        if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ServeError(
                f"an API key has {len(key)} characters; use at least {_SHORTEST}, ASCII without "
                "spaces"
            )
    everything = frozenset(Scope)
    names = ["default", *(f"default-{number}" for number in range(2, len(sent) + 1))]
    keys = [
        Key(name, digest_of(key), everything, "default")
        for name, key in zip(names, sent, strict=False)
    ]
    return Keys([*keys, *(_read(file) if file is not None else ())]), created


def _read(file: Path) -> list[Key]:
    where = shown_path(file)
    entries = json_value(read_bytes(file, ServeError), where, ServeError)
    if not isinstance(entries, list) or not entries:
        raise ServeError(f"{where} must be a list of at least one key")
    return [_key(entry, f"{where}, key {index}") for index, entry in enumerate(entries)]


def _key(entry: Any, where: str) -> Key:
    if not isinstance(entry, Mapping) or not _FIELDS.issuperset(entry):
        raise ServeError(f"{where} must be an object of {', '.join(sorted(_FIELDS))}")
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    tenant = entry.get("tenant", name)
    for label, value in (("name", name), ("tenant", tenant)):
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
            raise ServeError(
                f"{where}: {label}={shown(value)}; use 1 to 64 letters, digits, dots, - and _"
            )
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise ServeError(
            f"{where}: sha256={shown(digest)}; use the 64 hexadecimal digits of the key's SHA-256, "
            "as `printf %s KEY | sha256sum` prints them"
        )
    words = [scope.value for scope in Scope]
    if not isinstance(scopes, list) or not scopes or not all(word in words for word in scopes):
        raise ServeError(f"{where}: scopes={shown(scopes)}; use a list of {', '.join(words)}")
    return Key(str(name), bytes.fromhex(digest), frozenset(map(Scope, scopes)), str(tenant))

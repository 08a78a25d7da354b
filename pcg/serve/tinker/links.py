"""Links: addresses of files that need no key, which nobody can guess, for an hour."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

LINKS = "/tinker/api/v1/external_files"
"""The beginning of their paths."""
LIFE_S = 3600
"""The time for which a link holds, seconds."""
MOST_LINKS = 1024
"""The most links of a tenant; beyond it the tenant's oldest ends."""


@dataclass(frozen=True)
class Link:
    """A link.

    Attributes:
        tenant: the owner of its file.
        until_s: the time of `time.monotonic` from which on it does not hold.
    """

    tenant: str
    file: Path
    until_s: float


class Links:
    """The links of a server, which end with it; for one event loop."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._links: dict[str, Link] = {}
        self._paths: dict[str, deque[str]] = {}

    def make(self, tenant: str, file: Path) -> str:
        """Return the path of a new link to a file of a tenant's."""
        path = f"{self._prefix}/{secrets.token_urlsafe(32)}/{file.name}"
        own = self._paths.setdefault(tenant, deque())
        while len(own) >= MOST_LINKS:
            self._links.pop(own.popleft(), None)
        own.append(path)
        self._links[path] = Link(tenant, file, time.monotonic() + LIFE_S)
        return path

    def find(self, path: str) -> Link | None:
        """Return a link; None without, or once it has expired."""
        found = self._links.get(path)
        if found is not None and time.monotonic() > found.until_s:
            del self._links[path]
            return None
        return found

    def owner(self, path: str) -> str | None:
        """Return whose file a path without a key leads to; None if it is no link."""
        found = self.find(path)
        return None if found is None else found.tenant

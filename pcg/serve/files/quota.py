"""Quotas of tenants: how many files each keeps, and how many bytes, with those on their way."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pcg.serve.engine.options import ServeOptions
from pcg.serve.files.records import used
from pcg.serve.http.errors import ApiError


class InFlight:
    """The bytes of one file that comes.

    Args:
        coming: bytes that come now, by tenant.
        room: bytes that the tenant may have beside what it keeps.
        most: bytes that the file may have.
    """

    def __init__(self, coming: Counter[str], tenant: str, room: int, most: int) -> None:
        self.size_bytes = 0
        self._coming = coming
        self._tenant = tenant
        self._room = room
        self._most = most

    def add(self, size_bytes: int) -> None:
        """Count bytes that came. ApiError: they are too many."""
        self.size_bytes += size_bytes
        self._coming[self._tenant] += size_bytes
        if self.size_bytes > self._most:
            raise ApiError(
                413,
                f"The file has more than {self._most} bytes; send less.",
                param="file",
                code="file_too_large",
                headers={"connection": "close"},
            )
        if self._coming[self._tenant] > self._room:
            raise over_quota("bytes")


class Quota:
    """The quotas of a server's tenants."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._files: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()

    @contextmanager
    def flight(self, tenant: str, kept_bytes: int, part: int | None = None) -> Iterator[InFlight]:
        """Count a file, or a part of an upload, while it comes.

        Args:
            kept_bytes: bytes that the tenant keeps, or for a part those that are there: the room
                of its upload was promised.
            part: bytes that the part may have; None for a file.
        """
        options = self._options
        coming, most = self._files, options.max_file_bytes
        if part is not None:
            coming, most = self._parts, part
        one = InFlight(coming, tenant, options.tenant_files_bytes - kept_bytes, most)
        try:
            yield one
        finally:
            coming[tenant] -= one.size_bytes
            if not coming[tenant]:
                del coming[tenant]

    def check(self, connection: sqlite3.Connection, tenant: str, size_bytes: int) -> None:
        """Raise an ApiError if a tenant may not keep one more file of so many bytes."""
        files, _ = used(connection, tenant, int(time.time()))
        if files >= self._options.tenant_files:
            raise over_quota(f"files, at most {self._options.tenant_files}")
        self.check_bytes(connection, tenant, size_bytes)

    def check_bytes(self, connection: sqlite3.Connection, tenant: str, size_bytes: int) -> None:
        """Raise an ApiError if a tenant may not keep so many more bytes."""
        _, kept = used(connection, tenant, int(time.time()))
        if kept + size_bytes > self._options.tenant_files_bytes:
            raise over_quota(f"bytes, at most {self._options.tenant_files_bytes}")


def over_quota(what: str) -> ApiError:
    """Return the error of a tenant that would keep too much."""
    return ApiError(
        429,
        f"You keep too many {what}, of files, uploads and what jobs made; delete some.",
        code="insufficient_quota",
        headers={"x-should-retry": "false", "connection": "close"},
    )

"""Contents of files, each once, under its digest.

    <folder>/incoming/…             what is being written; a start removes it
    <folder>/files/3f/3f9a…         a content, under its SHA-256 in hexadecimal digits

A content is written and synced under a temporary name, then renamed by the thread that writes rows,
in the transaction of the row that names it. So a row never names what is not there; what no row
names is removed or put in quarantine by the next start (`removals`). A content is compared with its
name whenever it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pcg.errors import StoreDamagedError, StoreFullError
from pcg.files import sync_names
from pcg.serve.store import removals
from pcg.serve.store.database import as_store_error
from pcg.serve.store.reserve import Reserve

INCOMING = "incoming"
_READ_BYTES = 2**20


class Incoming:
    """A content while it comes.

    Attributes:
        size_bytes: bytes so far.
    """

    def __init__(self, folder: Path) -> None:
        self.size_bytes = 0
        self._path = folder / secrets.token_hex(16)
        self._sha256, self._md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        self._file = self._path.open("xb")

    @property
    def digest(self) -> str:
        """Its SHA-256."""
        return self._sha256.hexdigest()

    @property
    def md5(self) -> str:
        """Its MD5, by which a client may say what it sent."""
        return self._md5.hexdigest()

    def write(self, part: bytes) -> None:
        """Add bytes. StoreFullError: there is no room."""
        try:
            self._file.write(part)
        except OSError as error:
            raise as_store_error(error) from error
        self.size_bytes += len(part)
        self._sha256.update(part)
        self._md5.update(part)

    def finish(self) -> None:
        """Wait until all of it is on the disk. StoreFullError: there is no room."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise as_store_error(error) from error

    def drop(self) -> None:
        """Remove it, unless it was put among the contents; may be called again."""
        with contextlib.suppress(OSError):  # what a full disk does not take of the buffer
            self._file.close()
        self._path.unlink(missing_ok=True)

    def move(self, target: Path) -> None:
        """Give it its place; a content of this digest that is there is the same."""
        target.parent.mkdir(exist_ok=True)
        self._path.replace(target)
        sync_names(target.parent)


class Contents:
    """The contents of a store."""

    def __init__(self, folder: Path, reserve: Reserve) -> None:
        self._folder = folder
        self._reserve = reserve
        self._incoming = folder / INCOMING
        self._files = folder / "files"
        for one in (self._incoming, self._files):
            one.mkdir(exist_ok=True)

    def begin(self) -> Incoming:
        """Return a content to write. StoreFullError: there is no room."""
        if not self._reserve.is_whole:
            raise StoreFullError("there is no room on the disk")
        try:
            return Incoming(self._incoming)
        except OSError as error:
            raise as_store_error(error) from error

    def path(self, digest: str) -> Path:
        """Return where a content is."""
        return self._folder / relative(digest)

    def pieces(self, digest: str) -> Iterator[bytes]:
        """Yield the pieces of a content.

        Raises:
            StoreDamagedError: it is gone, or behind the last piece, it is not what was kept.
        """
        sha256 = hashlib.sha256()
        try:
            with self.path(digest).open("rb") as content:
                while piece := content.read(_READ_BYTES):
                    sha256.update(piece)
                    yield piece
        except OSError as error:
            raise _damaged(digest, error.strerror or "it cannot be read") from error
        if sha256.hexdigest() != digest:
            raise _damaged(digest, "its SHA-256 is not its name")

    def check(self, digest: str) -> Path:
        """Return where a content is, once it was compared with its name; errors of `pieces`."""
        for _ in self.pieces(digest):
            pass
        return self.path(digest)

    def put(self, incoming: Incoming) -> str:
        """Put a finished content among the others, within a write of the row that names it."""
        incoming.move(self.path(incoming.digest))
        return incoming.digest

    def remove_unnamed(self, connection: sqlite3.Connection, digest: str) -> None:
        """Remove a content that no row names any more, within a write behind that of the row."""
        if not _is_named(connection, digest):
            self.path(digest).unlink(missing_ok=True)
        removals.forget(connection, [relative(digest)])

    def clear_incoming(self) -> None:
        """Remove the unfinished contents that a crash left."""
        for unfinished in self._incoming.iterdir():
            removals.remove(unfinished)

    def unnamed(self, connection: sqlite3.Connection) -> list[Path]:
        """Return the contents that no row names."""
        found = sorted(self._files.glob("*/*"))
        return [path for path in found if not _is_named(connection, path.name)]


def relative(digest: str) -> str:
    """Return the path of a content in the data folder."""
    return f"files/{digest[:2]}/{digest}"


def _damaged(digest: str, why: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{relative(digest)} is damaged ({why}): bring it back from a copy, or upload it again"
    )


def _is_named(connection: sqlite3.Connection, digest: str) -> bool:
    return any(
        connection.execute(f"SELECT 1 FROM {table} WHERE digest = ? LIMIT 1", (digest,)).fetchone()
        for table in ("files", "upload_parts")
    )

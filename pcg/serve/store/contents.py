"""File contents (blobs), stored once under their digest, and the removal of unused paths.

    <folder>/incoming/…             blobs being written, which the next start removes
    <folder>/files/3f/3f9a…         a blob, under its SHA-256 in hexadecimal digits
    <folder>/quarantine/<date>/…    paths without a row and without a record of removal

A blob is written and synced under a temporary name. The writing thread renames it in the
transaction of its row, so a row never names a missing path. Reading a blob compares it with its
digest.

The table `removed` records the paths, relative to the data folder, of deleted rows (triggers in the
schema write the record), and paths being created. Recorded paths are deleted. A path without a row
and without a record, as after the database was restored from a copy, may be the only copy of a
user's data: it moves to quarantine and is never deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from pcg.errors import StoreDamagedError, StoreFullError
from pcg.files import shown_path, sync_names
from pcg.serve.store.database import Database, Reserve, as_store_error

# ----------------------------------------------------------------------------------------- removals


QUARANTINE = "quarantine"
_LOG = logging.getLogger("pcg.serve")


def note_removal(connection: sqlite3.Connection, path: str) -> None:
    """Record a path that has no row yet, so that it is removed if it never gets a row."""
    connection.execute(
        "INSERT OR REPLACE INTO removed (path, removed_s) VALUES (?, ?)", (path, int(time.time()))
    )


def recorded_removals(connection: sqlite3.Connection) -> set[str]:
    """Return the paths with a record of removal."""
    return {path for (path,) in connection.execute("SELECT path FROM removed")}


def forget_removals(connection: sqlite3.Connection, paths: Collection[str]) -> None:
    """Remove the records of paths that are deleted or have rows again."""
    connection.executemany("DELETE FROM removed WHERE path = ?", [(path,) for path in paths])


def discard(database: Database, folder: Path, unnamed: Iterable[Path]) -> None:
    """Delete paths with a record of removal, and move other paths to quarantine.

    Args:
        folder: the data folder.
        unnamed: paths in it that no row names.
    """
    known = database.read(recorded_removals).result()
    moved = []
    for path in unnamed:
        if str(path.relative_to(folder)) in known:
            remove_path(path)
            continue
        try:
            moved.append(to_quarantine(folder, path))
        except OSError as error:  # a full disk: the path stays in its place
            _LOG.error("%s cannot be moved to quarantine: %s", shown_path(path), error)
    if moved:
        _LOG.warning(
            "%d files and folders that no row of the database names were moved to quarantine, "
            "such as %s; `pcg data check` lists them",
            *(len(moved), shown_path(moved[0])),
        )


def remove_path(path: Path) -> None:
    """Remove a file or a folder with its contents, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def to_quarantine(folder: Path, path: Path) -> Path:
    """Move a path of a data folder to its quarantine. Return the new path."""
    place = folder / QUARANTINE / time.strftime("%Y-%m-%d") / path.relative_to(folder)
    free, count = place, 0
    while os.path.lexists(free):
        count += 1
        free = place.with_name(f"{place.name}.{count}")
    free.parent.mkdir(parents=True, exist_ok=True)
    path.rename(free)
    sync_names(free.parent)
    return free


# ----------------------------------------------------------------------------------------- contents


INCOMING = "incoming"
_READ_BYTES = 2**20


class Incoming:
    """A blob that is being received.

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
        return self._sha256.hexdigest()

    @property
    def md5(self) -> str:
        """The blob's MD5, which a client may send."""
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
        """Wait until the blob is on disk. StoreFullError: there is no room."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise as_store_error(error) from error

    def drop(self) -> None:
        """Remove the blob unless it was stored; idempotent."""
        with contextlib.suppress(OSError):  # a full disk cannot take the rest of the buffer
            self._file.close()
        self._path.unlink(missing_ok=True)

    def move(self, target: Path) -> None:
        """Rename the blob to its place; an existing file there has the same bytes."""
        target.parent.mkdir(exist_ok=True)
        self._path.replace(target)
        sync_names(target.parent)


class Contents:
    """The blobs of a store."""

    def __init__(self, folder: Path, reserve: Reserve) -> None:
        self._folder = folder
        self._reserve = reserve
        self._incoming = folder / INCOMING
        self._files = folder / "files"
        for folder in (self._incoming, self._files):
            folder.mkdir(exist_ok=True)

    def begin(self) -> Incoming:
        """Return a blob to write. StoreFullError: there is no room."""
        if not self._reserve.is_whole:
            raise StoreFullError("there is no room on the disk")
        try:
            return Incoming(self._incoming)
        except OSError as error:
            raise as_store_error(error) from error

    def path(self, digest: str) -> Path:
        return self._folder / relative(digest)

    def pieces(self, digest: str) -> Iterator[bytes]:
        """Yield the pieces of a blob.

        Raises:
            StoreDamagedError: the blob is missing, or, after the last piece, its digest is wrong.
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
        """Compare a blob with its digest, and return its path. Raises the errors of `pieces`."""
        for _ in self.pieces(digest):
            pass
        return self.path(digest)

    def put(self, incoming: Incoming) -> str:
        """Store a finished blob, within the write of its row."""
        incoming.move(self.path(incoming.digest))
        return incoming.digest

    def remove_unnamed(self, connection: sqlite3.Connection, digest: str) -> None:
        """Remove a blob without a row, within a write after the row's deletion."""
        if not _is_named(connection, digest):
            self.path(digest).unlink(missing_ok=True)
        forget_removals(connection, [relative(digest)])

    def clear_incoming(self) -> None:
        """Remove the blobs that a crash left unfinished."""
        for unfinished in self._incoming.iterdir():
            remove_path(unfinished)

    def unnamed(self, connection: sqlite3.Connection) -> list[Path]:
        paths = sorted(self._files.glob("*/*"))
        return [path for path in paths if not _is_named(connection, path.name)]


def relative(digest: str) -> str:
    """Return the path of a blob in the data folder."""
    return f"files/{digest[:2]}/{digest}"


def _damaged(digest: str, why: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{relative(digest)} is damaged ({why}): restore it from a copy, or upload it again"
    )


def _is_named(connection: sqlite3.Connection, digest: str) -> bool:
    return any(
        connection.execute(f"SELECT 1 FROM {table} WHERE digest = ? LIMIT 1", (digest,)).fetchone()
        for table in ("files", "upload_parts")
    )


# -------------------------------------------------------------------------------------------- named


_FOLDERS = (
    ("SELECT folder, 'model ' || name FROM models"),
    ("SELECT 'jobs/' || id, 'job ' || id FROM jobs WHERE finished_s IS NULL"),
    ("SELECT folder, 'checkpoint ' || path FROM tinker_checkpoints"),
    ("SELECT state, 'state of ' || id FROM tinker_models WHERE state IS NOT NULL"),
    (
        "SELECT folder, 'sampling session ' || id FROM tinker_samplers "
        "WHERE path IS NULL AND folder IS NOT NULL"
    ),
)
_CONTENTS = (
    "SELECT digest, 'file ' || id FROM files UNION ALL "
    "SELECT digest, 'part of upload ' || upload FROM upload_parts"
)


def named_paths(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the paths that rows name, relative to the data folder, each with its description."""
    named = {relative(digest): what for digest, what in connection.execute(_CONTENTS)}
    for query in _FOLDERS:
        named |= dict(iter(connection.execute(query)))
    return named


def missing(folder: Path, named: Mapping[str, str]) -> dict[str, int]:
    """Count missing paths by their top folder; -1 if all of its paths are missing."""
    total, lost = dict[str, int](), dict[str, int]()
    for path in named:
        kind = path.partition("/")[0]
        total[kind] = total.get(kind, 0) + 1
        lost[kind] = lost.get(kind, 0) + (not (folder / path).exists())
    return {kind: -1 if count == total[kind] else count for kind, count in lost.items()}

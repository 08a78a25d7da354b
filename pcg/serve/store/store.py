"""The store of a server: its folder, which one server has at a time.

<folder>/lock           held by the server that has the folder, with its process' number
<folder>/pcg.sqlite     the database
<folder>/files/         contents of files, by digest
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pcg.errors import ServeError
from pcg.files import expanded, shown_path, sync_names
from pcg.serve.store.contents import Contents
from pcg.serve.store.database import Database, connect
from pcg.serve.store.schema import migrate

DATABASE = "pcg.sqlite"
LOCK = "lock"


class Store:
    """All that a server keeps beyond its end.

    Attributes:
        folder: where it is.
        database: rows.
        contents: contents of files.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / DATABASE
        with _closing(connect(path)) as connection:
            migrate(connection, folder)
            self.contents = Contents(folder)
            self.contents.sweep(connection)
        sync_names(folder)
        self.folder = folder
        self.database = Database(path)

    def close(self) -> None:
        """End its threads, once everything is written."""
        self.database.close()


@contextmanager
def open_store(given: Path) -> Iterator[Store]:
    """Open the store in a folder, which is made if need be, until the end of the `with`.

    Raises:
        ServeError: another server has it, a newer pcg wrote it, or it cannot be used.
    """
    folder = expanded(given)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a folder"
        raise ServeError(
            f"--data-dir {shown_path(folder)} cannot be used: {reason}; give another folder"
        ) from error
    try:
        _take(lock, folder)
        try:
            store = Store(folder)
        except (OSError, sqlite3.Error) as error:
            raise ServeError(
                f"--data-dir {shown_path(folder)} cannot be used: {error}; give another folder, or "
                "bring back what it was from a copy"
            ) from error
        try:
            yield store
        finally:
            store.close()
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    """Take the lock of a folder, and write whose it is. ServeError: another server has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise ServeError(
            f"another server, process {owner}, serves --data-dir {shown_path(folder)}; end it, or "
            "give another folder"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


@contextmanager
def _closing(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield connection
    finally:
        connection.close()

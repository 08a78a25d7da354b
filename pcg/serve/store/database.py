"""The database of a store: SQLite with one thread that writes and one that reads.

A write is done once its transaction is on the disk (`synchronous=FULL`), so what was acknowledged
outlasts kill -9 and a power failure. Writes that wait share a transaction, and its wait for the
disk: each has a savepoint, so that one which fails undoes nothing of the others. On a full disk
writes that may use the reserve are made with its room, and all others fail.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pcg.errors import PcgError, StoreError, StoreFullError
from pcg.serve.store.reserve import Reserve

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Write:
    """A function to run in a transaction, and its result."""

    act: Callable[[sqlite3.Connection], Any]
    future: Future[Any]
    may_use_reserve: bool


_TOGETHER = 256
"""The most writes of one transaction."""
_FULL = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMOPEN,
)
_FULL_NUMBERS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def connect(path: Path, *, is_read_only: bool = False) -> sqlite3.Connection:
    """Open a database as all of its users do; any thread may use it, one at a time.

    Args:
        is_read_only: leave the database and its log as they are, also when it is closed.
    """
    uri = f"{path.absolute().as_uri()}?mode={'ro' if is_read_only else 'rwc'}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    if is_read_only:
        return connection
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA recursive_triggers = ON")  # REPLACE is a deletion for triggers, too
    return connection


def as_store_error(error: BaseException) -> BaseException:
    """Return what an error of the disk or the database means; other errors as they are."""
    if isinstance(error, sqlite3.Error):
        is_full = getattr(error, "sqlite_errorcode", None) in _FULL
    elif isinstance(error, OSError):
        is_full = error.errno in _FULL_NUMBERS
    else:
        return error
    kind = StoreFullError if is_full else StoreError
    text = "there is no room on the disk" if is_full else "the data folder cannot be used"
    made: PcgError = kind(f"{text}: {error}")
    made.__cause__ = error
    return made


class Database:
    """A database that is open; `close` ends its threads.

    Args:
        path: its file, whose schema is the newest.
        reserve: room for deletions on a full disk.
    """

    def __init__(self, path: Path, reserve: Reserve) -> None:
        self._reserve = reserve
        self._writing, self._reading = connect(path), connect(path)
        self._reading.execute("PRAGMA query_only = ON")
        self._writes: SimpleQueue[_Write | None] = SimpleQueue()
        self._reader = ThreadPoolExecutor(1, "pcg store reads")
        self._thread = threading.Thread(target=self._write_all, name="pcg store", daemon=True)
        self._thread.start()

    def write(
        self, act: Callable[[sqlite3.Connection], Result], *, may_use_reserve: bool = False
    ) -> Future[Result]:
        """Run a function in a transaction; done once what it wrote is on the disk.

        Args:
            act: runs on the writing thread. What it raises undoes its own changes alone.
            may_use_reserve: True for a deletion, and for a write that a start needs. On a full disk
                it is made with the room of the reserve; `act` may then run twice.
        Raises:
            StoreFullError: by the future, there is no room; nothing of it was written.
            StoreError: by the future, the disk fails otherwise.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        self._writes.put(_Write(act, future, may_use_reserve))
        return future

    def read(self, act: Callable[[sqlite3.Connection], Result]) -> Future[Result]:
        """Run a function on what was written before; errors as of `write`."""

        def run() -> Result:
            try:
                return act(self._reading)
            except Exception as error:
                raise as_store_error(error) from error.__cause__

        return self._reader.submit(run)

    def close(self) -> None:
        """End once everything that was asked is written."""
        self._writes.put(None)
        self._thread.join()
        self._reader.shutdown()
        self._reading.close()
        self._writing.close()

    # ------------------------------------------------------------------------------- the writer

    def _write_all(self) -> None:
        while True:
            batch = [self._writes.get()]
            try:
                while len(batch) < _TOGETHER:
                    batch.append(self._writes.get_nowait())
            except Empty:
                pass
            asked = [one for one in batch if one is not None]
            if asked:
                self._write_together(asked)
            if len(asked) < len(batch):
                return

    def _write_together(self, asked: list[_Write]) -> None:
        """Make writes, and those that may use the reserve again with its room on a full disk."""
        error: BaseException | None = None
        if not self._reserve.restore():
            asked = _of_reserve(asked, StoreFullError("there is no room on the disk"))
        while asked:
            error = self._transact(asked)
            if error is None:
                return
            if not isinstance(error, StoreFullError):
                break
            asked = _of_reserve(asked, error)
            if not self._reserve.release():
                break
        for write in asked:
            write.future.set_exception(error)

    def _transact(self, asked: list[_Write]) -> BaseException | None:
        """Run writes in one transaction; returns why all of it is undone, or None."""
        done: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._writing.execute("BEGIN IMMEDIATE")
            for write in asked:
                self._writing.execute("SAVEPOINT one")
                found = failed = None
                try:
                    found = write.act(self._writing)
                except Exception as error:
                    failed = as_store_error(error)
                    if write.may_use_reserve and isinstance(failed, StoreFullError):
                        raise
                    if not self._writing.in_transaction:  # the database undid all of it by itself
                        raise
                    self._writing.execute("ROLLBACK TO one")
                done.append((write.future, found, failed))
                self._writing.execute("RELEASE one")
            self._writing.execute("COMMIT")
        except BaseException as error:
            if self._writing.in_transaction:
                self._writing.execute("ROLLBACK")
            return as_store_error(error)
        for future, found, failed in done:
            if failed is None:
                future.set_result(found)
            else:
                future.set_exception(failed)
        return None


def _of_reserve(asked: list[_Write], error: BaseException) -> list[_Write]:
    """Return the writes that may use the reserve; the others fail by an error."""
    for write in asked:
        if not write.may_use_reserve:
            write.future.set_exception(error)
    return [write for write in asked if write.may_use_reserve]

"""The database of a store: SQLite with a writing thread and a reading thread.

A write is done when its transaction is on disk (`synchronous=FULL`), so acknowledged data survives
kill -9 and a power failure. Waiting writes share a transaction and its sync. Each has a savepoint,
so a failing write does not undo the others.

The reserve is a file of `RESERVE_BYTES` that is truncated to make room for deletions, so that a
full disk can be emptied. A write that may use the reserve and finds no room frees half of it. Until
the reserve is whole again, all other writes fail, and the store only reads and deletes.

SQLite's `user_version` is the number of the schema; a migration leads from each number to the next.
A released migration never changes: changes are new migrations.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pcg.errors import PcgError, ServeError, StoreError, StoreFullError

# ------------------------------------------------------------------------------------------ reserve


RESERVE = "reserve"
RESERVE_BYTES = 4 * 2**20
"""Room for the pages of some thousand deletions in the database's log."""
_LEAST_BYTES = 2**16
_AGAIN_S = 0.5
"""Time between two attempts to refill the reserve, seconds."""


class Reserve:
    """The reserve of a data folder; one thread at a time may use it.

    Attributes:
        is_whole: False while the store only reads and deletes.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE
        self._tried_s = -_AGAIN_S
        self.is_whole = self._size_bytes() >= RESERVE_BYTES

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def restore(self) -> bool:
        """Fill the reserve if there is room; return True if it is whole."""
        if self.is_whole or time.monotonic() - self._tried_s < _AGAIN_S:
            return self.is_whole
        self._tried_s = time.monotonic()
        before = self._size_bytes()
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # no room for its name
            return False
        try:
            os.posix_fallocate(handle, 0, RESERVE_BYTES)
            self.is_whole = True
        except OSError:
            os.ftruncate(handle, before)
        finally:
            os.close(handle)
        return self.is_whole

    def release(self) -> bool:
        """Free half of the reserve; return False if nothing is left."""
        before = self._size_bytes()
        if not before:
            return False
        os.truncate(self._path, before // 2 if before > _LEAST_BYTES else 0)
        self.is_whole = False
        return True


# ----------------------------------------------------------------------------------------- database


Result = TypeVar("Result")


@dataclass(frozen=True)
class _Write:
    """A function to run in a transaction, and its result."""

    act: Callable[[sqlite3.Connection], Any]
    future: Future[Any]
    may_use_reserve: bool


_TOGETHER = 256
"""The most writes of a transaction."""
_FULL = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMOPEN,
)
_FULL_NUMBERS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def connect(path: Path, *, is_read_only: bool = False) -> sqlite3.Connection:
    """Open a database with the store's settings; any thread may use it, one at a time.

    Args:
        is_read_only: leave the database and its log unchanged, also on closing.
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
    """Convert an error of the disk or the database; return other errors unchanged."""
    if isinstance(error, sqlite3.Error):
        is_full = getattr(error, "sqlite_errorcode", None) in _FULL
    elif isinstance(error, OSError):
        is_full = error.errno in _FULL_NUMBERS
    else:
        return error
    kind = StoreFullError if is_full else StoreError
    text = "there is no room on the disk" if is_full else "the data folder cannot be used"
    store_error: PcgError = kind(f"{text}: {error}")
    store_error.__cause__ = error
    return store_error


class Database:
    """An open database; `close` ends its threads.

    Args:
        path: the file, with the newest schema.
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
        """Run a function in a transaction. The future completes when its changes are on disk.

        Args:
            act: runs on the writing thread. An exception undoes only its own changes.
            may_use_reserve: True for a deletion, and for a write that a start needs. A full disk
                then frees room of the reserve, and `act` may run twice.
        Raises:
            StoreFullError: in the future, there is no room; nothing was written.
            StoreError: in the future, another failure of the disk.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        self._writes.put(_Write(act, future, may_use_reserve))
        return future

    def read(self, act: Callable[[sqlite3.Connection], Result]) -> Future[Result]:
        """Run a function that sees all completed writes. Raises the errors of `write`."""

        def run() -> Result:
            try:
                return act(self._reading)
            except Exception as error:
                raise as_store_error(error) from error.__cause__

        return self._reader.submit(run)

    def close(self) -> None:
        """Complete the waiting writes and end the threads."""
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
            writes = [write for write in batch if write is not None]
            if writes:
                self._write_together(writes)
            if len(writes) < len(batch):
                return

    def _write_together(self, writes: list[_Write]) -> None:
        """Run writes; on a full disk, repeat those that may use the reserve with its room."""
        error: BaseException | None = None
        if not self._reserve.restore():
            writes = _of_reserve(writes, StoreFullError("there is no room on the disk"))
        while writes:
            error = self._transact(writes)
            if error is None:
                return
            if not isinstance(error, StoreFullError):
                break
            writes = _of_reserve(writes, error)
            if not self._reserve.release():
                break
        for write in writes:
            write.future.set_exception(error)

    def _transact(self, writes: list[_Write]) -> BaseException | None:
        """Run writes in a transaction; return the error that undid all of it, or None."""
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._writing.execute("BEGIN IMMEDIATE")
            for write in writes:
                self._writing.execute("SAVEPOINT act")
                result = failed = None
                try:
                    result = write.act(self._writing)
                except Exception as error:
                    failed = as_store_error(error)
                    if write.may_use_reserve and isinstance(failed, StoreFullError):
                        raise
                    if not self._writing.in_transaction:  # SQLite has rolled back by itself
                        raise
                    self._writing.execute("ROLLBACK TO act")
                results.append((write.future, result, failed))
                self._writing.execute("RELEASE act")
            self._writing.execute("COMMIT")
        except BaseException as error:
            if self._writing.in_transaction:
                self._writing.execute("ROLLBACK")
            return as_store_error(error)
        for future, result, failed in results:
            if failed is None:
                future.set_result(result)
            else:
                future.set_exception(failed)
        return None


def _of_reserve(writes: list[_Write], error: BaseException) -> list[_Write]:
    """Return the writes that may use the reserve; fail the other writes with an error."""
    for write in writes:
        if not write.may_use_reserve:
            write.future.set_exception(error)
    return [write for write in writes if write.may_use_reserve]


# ------------------------------------------------------------------------------------------- schema


_CONTENT = "'files/' || substr(OLD.digest, 1, 2) || '/' || OLD.digest"


def _notes(event: str, path: str, when: str = "1") -> str:
    """Return a trigger that records a path as removed with the row that named it."""
    name = "_".join(("removed", *event.lower().split()))
    return (
        f"CREATE TRIGGER {name} AFTER {event} WHEN {when} BEGIN INSERT OR REPLACE INTO removed "
        f"(path, removed_s) VALUES ({path}, CAST(strftime('%s', 'now') AS INTEGER)); END"
    )


MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE files (
            place INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            created_s INTEGER NOT NULL,
            expires_s INTEGER,
            digest TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX files_of_tenant ON files (tenant, place)",
        "CREATE INDEX files_of_digest ON files (digest)",
    ),
    (
        """CREATE TABLE uploads (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            mime_type TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            created_s INTEGER NOT NULL,
            expires_s INTEGER NOT NULL,
            file_expires_after_s INTEGER,
            status TEXT NOT NULL,
            file TEXT
        ) STRICT""",
        "CREATE INDEX uploads_of_tenant ON uploads (tenant, status)",
        """CREATE TABLE upload_parts (
            id TEXT PRIMARY KEY,
            upload TEXT NOT NULL REFERENCES uploads (id) ON DELETE CASCADE,
            created_s INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            digest TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX parts_of_upload ON upload_parts (upload)",
        "CREATE INDEX parts_of_digest ON upload_parts (digest)",
        "CREATE INDEX files_by_id ON files (tenant, id)",
    ),
    (
        """CREATE TABLE jobs (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            name TEXT NOT NULL,
            status TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            finished_s INTEGER,
            training_file TEXT NOT NULL,
            validation_file TEXT,
            seed INTEGER NOT NULL,
            metadata TEXT,
            config TEXT NOT NULL,
            trained_tokens INTEGER,
            result_file TEXT,
            error TEXT
        ) STRICT""",
        "CREATE INDEX jobs_of_tenant ON jobs (tenant, id)",
        "CREATE INDEX jobs_of_status ON jobs (status)",
        """CREATE TABLE job_events (
            id TEXT PRIMARY KEY,
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            created_s INTEGER NOT NULL,
            level TEXT NOT NULL,
            type TEXT NOT NULL,
            message TEXT NOT NULL,
            data TEXT,
            step INTEGER,
            UNIQUE (job, type, step)
        ) STRICT""",
        "CREATE INDEX events_of_job ON job_events (job, id)",
        """CREATE TABLE job_checkpoints (
            id TEXT PRIMARY KEY,
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            created_s INTEGER NOT NULL,
            step INTEGER NOT NULL,
            model TEXT NOT NULL,
            metrics TEXT NOT NULL,
            UNIQUE (job, step)
        ) STRICT""",
        """CREATE TABLE models (
            name TEXT NOT NULL,
            tenant TEXT NOT NULL,
            folder TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            PRIMARY KEY (tenant, name)
        ) STRICT""",
    ),
    (
        """CREATE TABLE tinker_sessions (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            status TEXT NOT NULL,
            tags TEXT NOT NULL,
            user_metadata TEXT,
            display_name TEXT,
            sdk_version TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX tinker_sessions_of_tenant ON tinker_sessions (tenant, id)",
        """CREATE TABLE tinker_futures (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            stream TEXT NOT NULL,
            seq INTEGER NOT NULL,
            kind TEXT NOT NULL,
            answer TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            request BLOB,
            state TEXT NOT NULL,
            media_type TEXT,
            result BLOB,
            category TEXT,
            finished_s INTEGER,
            UNIQUE (stream, seq)
        ) STRICT""",
        "CREATE INDEX tinker_futures_of_state ON tinker_futures (state, finished_s)",
        """CREATE TABLE tinker_models (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            seq INTEGER NOT NULL,
            base_model TEXT NOT NULL,
            lora TEXT NOT NULL,
            user_metadata TEXT,
            created_s INTEGER NOT NULL,
            asked_s INTEGER NOT NULL,
            status TEXT NOT NULL,
            state TEXT,
            state_seq INTEGER NOT NULL,
            done_seq INTEGER NOT NULL,
            UNIQUE (session, seq)
        ) STRICT""",
        "CREATE INDEX tinker_models_of_tenant ON tinker_models (tenant, id)",
        """CREATE TABLE tinker_checkpoints (
            path TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            folder TEXT NOT NULL,
            base_model TEXT NOT NULL,
            lora TEXT NOT NULL,
            user_metadata TEXT,
            size_bytes INTEGER NOT NULL,
            created_s INTEGER NOT NULL,
            expires_s INTEGER,
            is_public INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX tinker_checkpoints_of_tenant ON tinker_checkpoints (tenant, path)",
        "CREATE INDEX tinker_checkpoints_of_model ON tinker_checkpoints (model, path)",
    ),
    (
        """CREATE TABLE tinker_samplers (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            seq INTEGER NOT NULL,
            base_model TEXT NOT NULL,
            path TEXT,
            folder TEXT,
            created_s INTEGER NOT NULL,
            UNIQUE (session, seq)
        ) STRICT""",
    ),
    (
        """CREATE TABLE job_data (
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            tenant TEXT NOT NULL,
            digest TEXT NOT NULL,
            size_bytes INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX job_data_of_job ON job_data (job)",
        "CREATE INDEX job_data_of_tenant ON job_data (tenant)",
        """CREATE TABLE job_folders (
            job TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            size_bytes INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX job_folders_of_tenant ON job_folders (tenant)",
        "CREATE TABLE bases (digest TEXT PRIMARY KEY, name TEXT NOT NULL) STRICT",
        "ALTER TABLE jobs ADD COLUMN base TEXT",
        "ALTER TABLE models ADD COLUMN base TEXT",
        "CREATE INDEX jobs_of_end ON jobs (finished_s)",
        """CREATE TABLE checkpoint_permissions (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            project TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            UNIQUE (tenant, model, project),
            FOREIGN KEY (tenant, model) REFERENCES models (tenant, name) ON DELETE CASCADE
        ) STRICT""",
    ),
    (
        "ALTER TABLE jobs ADD COLUMN config_bytes INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX jobs_of_config ON jobs (tenant, config_bytes)",
    ),
    (
        """CREATE TABLE tinker_losses (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            session TEXT NOT NULL,
            seq INTEGER NOT NULL,
            graph TEXT NOT NULL,
            created_s INTEGER NOT NULL,
            UNIQUE (session, seq)
        ) STRICT""",
        "CREATE INDEX tinker_losses_of_tenant ON tinker_losses (tenant)",
    ),
    (
        "ALTER TABLE tinker_samplers ADD COLUMN size_bytes INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX tinker_samplers_of_tenant ON tinker_samplers (tenant)",
    ),
    (
        "ALTER TABLE tinker_sessions ADD COLUMN ended_s INTEGER",
        "CREATE INDEX tinker_futures_of_session ON tinker_futures (session)",
    ),
    (
        "CREATE TABLE identity (id TEXT NOT NULL, is_written INTEGER NOT NULL) STRICT",
        "CREATE TABLE removed (path TEXT PRIMARY KEY, removed_s INTEGER NOT NULL) STRICT",
        _notes("DELETE ON files", _CONTENT),
        _notes("DELETE ON upload_parts", _CONTENT),
        _notes("DELETE ON jobs", "'jobs/' || OLD.id"),
        _notes("DELETE ON models", "OLD.folder"),
        _notes("DELETE ON tinker_checkpoints", "OLD.folder"),
        _notes(
            "DELETE ON tinker_samplers",
            "OLD.folder",
            "OLD.path IS NULL AND OLD.folder IS NOT NULL",
        ),
        _notes("DELETE ON tinker_models", "OLD.state", "OLD.state IS NOT NULL"),
        _notes(
            "UPDATE OF state ON tinker_models",
            "OLD.state",
            "OLD.state IS NOT NULL AND OLD.state IS NOT NEW.state",
        ),
    ),
)
"""Migrations: the statements from schema 0, which is empty, to 1, from 1 to 2, and so on."""


def migrate(connection: sqlite3.Connection, folder: Path) -> None:
    """Migrate a database to the newest schema, completely or not at all.

    Raises:
        ServeError: a newer pcg wrote it.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    newest = len(MIGRATIONS)
    if version > newest:
        raise ServeError(
            f"{folder} has schema {version}, and this pcg knows schemas up to {newest}: serve it "
            "with the pcg that wrote it or a later one, or give another --data-dir"
        )
    if version == newest:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {newest}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise

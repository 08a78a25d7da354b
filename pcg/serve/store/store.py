"""The store of a server: a data folder, which a server uses exclusively.

<folder>/lock           locked by the server; text: process id and a random number of this use of
                        the database, which its header also has; `ended` after an orderly end
<folder>/identity.json  the id of the folder, which the database also has
<folder>/pcg.sqlite     the database
<folder>/SHA256SUMS     the checksum of the database, while no server uses it
<folder>/files/         blobs, by digest; jobs/ and tinker/ have folders that rows name
<folder>/quarantine/    paths without a row, found at a start; damaged files, of a repair
<folder>/reserve        a file that is truncated to make room for deletions on a full disk

A missing part never causes a deletion: a folder with parts of different stores is refused, and `pcg
data check` reports its faults.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from pcg.errors import ServeError, StoreError, StoreFullError
from pcg.files import (
    SUMS,
    check_sums,
    expanded,
    is_file,
    read_json,
    sha256_of,
    shown_path,
    sync_names,
    write_sums,
    write_text,
)
from pcg.serve.store.contents import (
    Contents,
    discard,
    forget_removals,
    missing,
    named_paths,
    recorded_removals,
)
from pcg.serve.store.database import Database, Reserve, as_store_error, connect, migrate

DATABASE = "pcg.sqlite"
IDENTITY = "identity.json"
LOCK = "lock"
KEPT = ("files", "jobs", "tinker")
"""Subfolders with the files and folders that rows of the database name."""
_ENDED, _ENDING, _STARTING = "ended", "ending", "starting"
_LOG = logging.getLogger("pcg.serve")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Store:
    """The durable state of a server.

    Attributes:
        folder: the data folder.
        database: the SQLite database.
        contents: the blobs of uploaded files.
        reserve: a file that is truncated for deletions on a full disk, and refilled later.
    """

    def __init__(self, folder: Path, reserve: Reserve) -> None:
        self.folder, self.reserve = folder, reserve
        path = folder / DATABASE
        with closing(open_database(folder)) as connection:
            begin_use(connection, folder)
            self.contents = Contents(folder, reserve)
            unnamed = self.contents.unnamed(connection)
        self.contents.clear_incoming()
        sync_names(folder)
        reserve.restore()
        self.database = Database(path, reserve)
        try:
            self.database.write(partial(_begin_log, folder=folder), may_use_reserve=True).result()
            _say(folder, f"{os.getpid()} {_use_of(path)}")  # from now on its log is not empty
            self.discard(unnamed)
        except BaseException:
            self.database.close()
            raise

    async def read(
        self,
        act: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function that sees all completed writes."""
        read = self.database.read(lambda connection: act(connection, *args, **keywords))
        return await asyncio.wrap_future(read)

    async def write(
        self,
        act: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function in a transaction and wait for the disk, as `Database.write`."""
        write = self.database.write(lambda connection: act(connection, *args, **keywords))
        return await asyncio.wrap_future(write)

    async def remove(
        self,
        act: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a deletion like `write`. On a full disk, it may truncate the reserve for room."""
        write = self.database.write(
            lambda connection: act(connection, *args, **keywords), may_use_reserve=True
        )
        return await asyncio.wrap_future(write)

    def discard(self, unnamed: Iterable[Path]) -> None:
        """Delete paths with a record of removal, and move the others to quarantine."""
        discard(self.database, self.folder, unnamed)

    def close(self) -> None:
        """Complete all writes and end the threads."""
        self.database.close()


def open_database(folder: Path, *, is_checked: bool = True) -> sqlite3.Connection:
    """Open the database of a data folder; refuse a damaged or foreign database or log.

    Args:
        is_checked: refuse a database if a subfolder lacks all its paths; log other missing paths.

    Raises:
        ServeError: the database is missing although contents exist, is damaged, or belongs to
            another folder; or its log is missing or belongs to another database.
    """
    path, kept = folder / DATABASE, [name for name in KEPT if _has_entries(folder / name)]
    fix = f"; restore it from a copy, or run {_check(folder)}"
    check_sums(folder, (DATABASE,), ServeError, fix)
    if kept or is_file(folder / IDENTITY):
        what = f"the contents of {', '.join(f'{name}/' for name in kept)}" if kept else IDENTITY
        if not is_file(path) or not path.stat().st_size:
            state = "is empty" if is_file(path) else "is missing"
            raise ServeError(f"{shown_path(path)} {state}, but {what} exists{fix}")
    state, _, _ = _owner(folder / LOCK).partition(" ")
    is_running = state not in ("", _ENDED, _ENDING, _STARTING)
    log, has_log = path.with_name(f"{DATABASE}-wal"), has_log_of(path)
    # On closing, the last connection removes the log and its index (-shm) together.
    if is_running and is_file(path.with_name(f"{DATABASE}-shm")) and not has_log:
        raise ServeError(
            f"{shown_path(log)} is missing, and its server was killed before it had written all "
            f"of it to {DATABASE}{fix}"
        )
    if has_foreign_log(folder):
        raise ServeError(
            f"{shown_path(log)} is the log of another {DATABASE}, which was replaced: restore "
            f"both from the same copy, or move {log.name} away to continue without it{fix}"
        )
    # A lock without a use number cannot reveal a foreign log. So a read-only connection checks the
    # database with its log first; only then may a connection write the log into the database.
    connection = connect(path, is_read_only=has_log)
    try:
        _check_database(connection, folder, kept, fix)
        if is_checked:
            _check_contents(connection, folder, fix)
    except BaseException:
        connection.close()
        raise
    if has_log:
        connection.close()
        connection = connect(path)
    return connection


def has_log_of(database: Path) -> bool:
    """Return whether a database has a log that is not empty."""
    log = database.with_name(f"{DATABASE}-wal")
    return is_file(log) and log.stat().st_size > 0


def has_foreign_log(folder: Path) -> bool:
    """Return whether a folder's log belongs to another database, according to the lock."""
    _, _, use = _owner(folder / LOCK).partition(" ")
    return has_log_of(folder / DATABASE) and use not in ("", _use_of(folder / DATABASE))


def _use_of(database: Path) -> str:
    """Return the random number of a database's last use, SQLite's application id, as hex."""
    with database.open("rb") as file:
        return file.read(72)[68:].hex()


def _check_database(
    connection: sqlite3.Connection, folder: Path, kept: list[str], fix: str
) -> None:
    """Raise a ServeError for a damaged database, or the database of another folder."""
    if not is_file(folder / SUMS):
        (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise ServeError(f"{shown_path(folder / DATABASE)} is damaged: {state}{fix}")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    if not tables and (kept or is_file(folder / IDENTITY)):
        raise ServeError(f"{shown_path(folder / DATABASE)} has no tables{fix}")
    row = None
    if "identity" in tables:
        row = connection.execute("SELECT id, is_written FROM identity").fetchone()
    if row is None or not row["is_written"]:  # of an older pcg, or being created
        return
    path = folder / IDENTITY
    id = read_json(path, ServeError, fix).get("id")
    if id != row["id"]:
        raise ServeError(
            f"{shown_path(path)} has the id {str(id)[:64]}, and {DATABASE} is of the folder "
            f"{row['id']}: restore both from the same copy, or run {_check(folder)}"
        )


def _check_contents(connection: sqlite3.Connection, folder: Path, fix: str) -> None:
    """Raise a ServeError if a subfolder lacks all its named paths; log other missing paths."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'identity'").fetchone() is None:
        return  # of an older pcg; the next start checks it
    lost = missing(folder, named_paths(connection))
    for kind, count in lost.items():
        if count == -1:
            raise ServeError(
                f"{shown_path(folder / DATABASE)} names paths in {kind}/, and all of them are "
                f"missing{fix}"
            )
    if any(lost.values()):
        _LOG.error(
            "%d paths that %s names are missing; %s lists them",
            *(sum(lost.values()), DATABASE, _check(folder)),
        )


def begin_use(connection: sqlite3.Connection, folder: Path) -> None:
    """Migrate a database, write its id and its folder's, and record this use in database and lock.

    Raises:
        ServeError: a newer pcg wrote it.
    """
    _say(folder, f"{_STARTING} {_use_of(folder / DATABASE)}")  # a killed start leaves no log
    migrate(connection, folder)
    (folder / SUMS).unlink(missing_ok=True)  # valid only while no server uses the database
    row = connection.execute("SELECT id, is_written FROM identity").fetchone()
    id = secrets.token_hex(16) if row is None else row["id"]
    if row is None:
        connection.execute("INSERT INTO identity (id, is_written) VALUES (?, 0)", (id,))
    if row is None or not row["is_written"]:
        write_identity(folder, id)
        connection.execute("UPDATE identity SET is_written = 1")
    connection.execute(f"PRAGMA application_id = {secrets.randbits(31)}")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    _say(folder, f"{_STARTING} {_use_of(folder / DATABASE)}")


def write_identity(folder: Path, id: str) -> None:
    """Write the id of a data folder atomically. OSError: it cannot be written."""
    beside = folder / f".{IDENTITY}"
    write_text(beside, json.dumps({"id": id}) + "\n")
    beside.replace(folder / IDENTITY)
    sync_names(folder)


def _begin_log(connection: sqlite3.Connection, folder: Path) -> None:
    """Forget completed removals. Always write, so that the log of a server in use is not empty."""
    # SQLite writes no page for an equal value; 1 and 2 are both true.
    connection.execute("UPDATE identity SET is_written = 3 - is_written")
    gone = [path for path in recorded_removals(connection) if not (folder / path).exists()]
    forget_removals(connection, gone)


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _check(folder: Path) -> str:
    return f"`pcg data check {shown_path(folder)}`"


@contextmanager
def locked(data_dir: Path) -> Iterator[tuple[Path, Reserve]]:
    """Lock a data folder, created if missing, within a `with`.

    Raises:
        ServeError: another server uses the folder, or it cannot be created or opened.
    """
    folder = expanded(data_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a valid folder name"
        raise ServeError(
            f"--data-dir {shown_path(folder)} cannot be used: {reason}; give another folder"
        ) from error
    try:
        _take(lock, folder)
        yield folder, Reserve(folder)
    finally:
        os.close(lock)


@contextmanager
def open_store(data_dir: Path) -> Iterator[Store]:
    """Open the store in a folder, created if missing, within a `with`.

    On a full disk the store only reads and deletes; deletions use the room of the reserve.

    Raises:
        ServeError: another server uses the folder, a newer pcg wrote it, its parts belong to
            different stores, or it cannot be used.
    """
    with locked(data_dir) as (folder, reserve):
        store = _opened(folder, reserve)
        try:
            yield store
        finally:
            _say(folder, _ENDING)
            store.close()
            end_use(folder)


def _opened(folder: Path, reserve: Reserve) -> Store:
    while True:
        try:
            return Store(folder, reserve)
        except (OSError, sqlite3.Error, StoreError) as error:
            is_full = isinstance(as_store_error(error), StoreFullError)
            if is_full and reserve.release():
                continue
            fix = f"give another folder, restore it from a copy, or run {_check(folder)}"
            if is_full:
                fix = "its disk has no room for a start: free 1 MiB, then delete files"
            raise ServeError(
                f"--data-dir {shown_path(folder)} cannot be used: {reason_of(error)}; {fix}"
            ) from error


def reason_of(error: BaseException) -> str:
    """Return the text of an error; for an OSError, its path and reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{shown_path(Path(error.filename))}: {error.strerror}"
    return str(error)


def end_use(folder: Path) -> None:
    """Write the checksum of a closed database, and `ended` into the lock."""
    path = folder / DATABASE
    with suppress(OSError):  # on a full disk, the next start runs SQLite's check instead
        if not path.with_name(f"{DATABASE}-wal").exists():
            write_sums(folder, {DATABASE: {sha256_of(path)}})
    _say(folder, _ENDED)


def _say(folder: Path, text: str) -> None:
    """Overwrite the lock's text in place, as a full disk has no room for a new file.

    Sync the text before the database's log is written: after a power failure, the use number shows
    whether the log belongs to the database.
    """
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        lock.write(f"{text}\n")
        lock.truncate()
        lock.flush()
        os.fsync(lock.fileno())


def _owner(lock: Path) -> str:
    try:
        return lock.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _take(lock: int, folder: Path) -> None:
    """Take the lock of a folder. ServeError: another server holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").partition(" ")[0]
        owner = owner if owner.isdecimal() else "unknown"
        raise ServeError(
            f"another server, process {owner}, uses --data-dir {shown_path(folder)}; end it, or "
            "give another folder"
        ) from None

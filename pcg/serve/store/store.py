"""The store of a server: its folder, which one server has at a time.

<folder>/lock           held by the server that has the folder, with its process' number and that of
                        its use of the database; `ended` once that has ended in order
<folder>/identity.json  the id of the folder, which the database has, too
<folder>/pcg.sqlite     the database
<folder>/SHA256SUMS     the checksum of the database, while no server has it
<folder>/files/         contents of files, by digest
<folder>/quarantine/    what no row named when a server began
<folder>/reserve        room for deletions on a full disk

Nothing is removed because something else is missing: a folder with parts of different stores is
refused, and `pcg data check` reports its faults.
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
"""The folders of what rows name."""
_ENDED, _ENDING = "ended", "ending"
_LOG = logging.getLogger("pcg.serve")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Store:
    """The durable state of a server.

    Attributes:
        folder: where it is.
        database: rows.
        contents: contents of files.
        reserve: room for deletions, which is whole unless the disk is full.
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
        """Run a function on the rows that were written before."""
        read = self.database.read(lambda connection: act(connection, *args, **keywords))
        return await asyncio.wrap_future(read)

    async def write(
        self,
        act: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function in a transaction, and wait for the disk; errors as of `Database.write`."""
        write = self.database.write(lambda connection: act(connection, *args, **keywords))
        return await asyncio.wrap_future(write)

    async def remove(
        self,
        act: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function that deletes, as `write`, on a full disk with the room of the reserve."""
        write = self.database.write(
            lambda connection: act(connection, *args, **keywords), may_use_reserve=True
        )
        return await asyncio.wrap_future(write)

    def discard(self, unnamed: Iterable[Path]) -> None:
        """Delete paths that a record of removals names, and move the others to quarantine."""
        discard(self.database, self.folder, unnamed)

    def close(self) -> None:
        """End its threads, once everything is written."""
        self.database.close()


def open_database(folder: Path, *, is_checked: bool = True) -> sqlite3.Connection:
    """Open the database of a data folder, which belongs to what is in it and is undamaged.

    Args:
        is_checked: refuse a database of whose contents none is there, and log what is missing.

    Raises:
        ServeError: it is not there and contents are, it is damaged, or it is of another folder.
    """
    path, kept = folder / DATABASE, [name for name in KEPT if _has_entries(folder / name)]
    fix = f"; bring it back from a copy, or run {_check(folder)}"
    check_sums(folder, (DATABASE,), ServeError, fix)
    if kept or is_file(folder / IDENTITY):
        what = f"the contents of {', '.join(f'{name}/' for name in kept)}" if kept else IDENTITY
        if not is_file(path) or not path.stat().st_size:
            state = "is empty" if is_file(path) else "is not there"
            raise ServeError(f"{shown_path(path)} {state}, and {what} is without it{fix}")
    is_running = _owner(folder / LOCK) not in ("", _ENDED, _ENDING)
    log, has_log = path.with_name(f"{DATABASE}-wal"), has_log_of(path)
    # Who closes the database last removes the log with its index.
    if is_running and is_file(path.with_name(f"{DATABASE}-shm")) and not has_log:
        raise ServeError(
            f"{shown_path(log)} is not there, and its server was killed before it had written all "
            f"of it to {DATABASE}{fix}"
        )
    if has_foreign_log(folder):
        raise ServeError(
            f"{shown_path(log)} is the log of another {DATABASE}, which was replaced: put back "
            f"both from one copy, or move {log.name} away to go on without it{fix}"
        )
    # A log may be of another database still, where the use of neither is known: until both are
    # known to be whole, nothing is written from the log to the database.
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
    """Return whether a database has a log that is not all in it."""
    log = database.with_name(f"{DATABASE}-wal")
    return is_file(log) and log.stat().st_size > 0


def has_foreign_log(folder: Path) -> bool:
    """Return whether the log in a folder was begun beside another database, as the lock tells."""
    _, _, use = _owner(folder / LOCK).partition(" ")
    return has_log_of(folder / DATABASE) and use not in ("", _use_of(folder / DATABASE))


def _use_of(database: Path) -> str:
    """Return the number of a database's last use: SQLite's application id, in its header."""
    with database.open("rb") as file:
        return file.read(72)[68:].hex()


def _check_database(
    connection: sqlite3.Connection, folder: Path, kept: list[str], fix: str
) -> None:
    """Refuse a database that is damaged, or another one. ServeError."""
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
    if row is None or not row["is_written"]:  # an older pcg's, or one that is being made
        return
    path = folder / IDENTITY
    id = read_json(path, ServeError, fix).get("id")
    if id != row["id"]:
        raise ServeError(
            f"{shown_path(path)} has the id {str(id)[:64]}, and {DATABASE} is of the folder "
            f"{row['id']}: put back both from one copy, or run {_check(folder)}"
        )


def _check_contents(connection: sqlite3.Connection, folder: Path, fix: str) -> None:
    """Refuse a database without its contents. ServeError."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'identity'").fetchone() is None:
        return  # an older pcg's, which the next start compares
    lost = missing(folder, named_paths(connection))
    for kind, count in lost.items():
        if count == -1:
            raise ServeError(
                f"{shown_path(folder / DATABASE)} names what was in {kind}/, and none of it is "
                f"there{fix}"
            )
    if any(lost.values()):
        _LOG.error(
            "%d paths that %s names are missing; %s tells which",
            *(sum(lost.values()), DATABASE, _check(folder)),
        )


def begin_use(connection: sqlite3.Connection, folder: Path) -> None:
    """Bring a database to the newest schema, and give it and its folder their id.

    Raises:
        ServeError: a newer pcg wrote it.
    """
    migrate(connection, folder)
    (folder / SUMS).unlink(missing_ok=True)  # it holds for a database that nobody uses
    row = connection.execute("SELECT id, is_written FROM identity").fetchone()
    id = secrets.token_hex(16) if row is None else row["id"]
    if row is None:
        connection.execute("INSERT INTO identity (id, is_written) VALUES (?, 0)", (id,))
    if row is None or not row["is_written"]:
        write_identity(folder, id)
        connection.execute("UPDATE identity SET is_written = 1")
    connection.execute(f"PRAGMA application_id = {secrets.randbits(31)}")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    _say(folder, f"{os.getpid()} {_use_of(folder / DATABASE)}")


def write_identity(folder: Path, id: str) -> None:
    """Write the id of a data folder in one step. OSError: it cannot be written."""
    beside = folder / f".{IDENTITY}"
    write_text(beside, json.dumps({"id": id}) + "\n")
    beside.replace(folder / IDENTITY)
    sync_names(folder)


def _begin_log(connection: sqlite3.Connection, folder: Path) -> None:
    """Write something, so that the log is not empty while a server has the folder."""
    connection.execute("UPDATE identity SET is_written = 1")
    gone = [path for path in recorded_removals(connection) if not (folder / path).exists()]
    forget_removals(connection, gone)


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _check(folder: Path) -> str:
    return f"`pcg data check {shown_path(folder)}`"


@contextmanager
def locked(data_dir: Path) -> Iterator[tuple[Path, Reserve]]:
    """Have a data folder alone, which is made if need be, until the end of the `with`.

    Raises:
        ServeError: another server has it, or it cannot be used.
    """
    folder = expanded(data_dir)
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
        yield folder, Reserve(folder)
    finally:
        os.close(lock)


@contextmanager
def open_store(data_dir: Path) -> Iterator[Store]:
    """Open the store in a folder, which is made if need be, until the end of the `with`.

    On a full disk it only reads and deletes, with the room of its reserve.

    Raises:
        ServeError: another server has it, a newer pcg wrote it, its parts do not belong together,
            or it cannot be used.
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
            fix = f"give another folder, bring it back from a copy, or run {_check(folder)}"
            if is_full:
                fix = "there is no room on its disk to begin: make 1 MiB free, then delete files"
            raise ServeError(
                f"--data-dir {shown_path(folder)} cannot be used: {reason_of(error)}; {fix}"
            ) from error


def reason_of(error: BaseException) -> str:
    """Return what an error says, for one of the system the path and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{shown_path(Path(error.filename))}: {error.strerror}"
    return str(error)


def end_use(folder: Path) -> None:
    """Write the checksum of a database that is closed, and that its server has ended."""
    path = folder / DATABASE
    with suppress(OSError):  # a full disk: the next start checks the database otherwise
        if not path.with_name(f"{DATABASE}-wal").exists():
            write_sums(folder, {DATABASE: {sha256_of(path)}})
    _say(folder, _ENDED)


def _say(folder: Path, text: str) -> None:
    """Write who has a folder, over what was written, as a full disk has no room for more.

    It is on the disk before a log is: after a power failure the use of the log's database is known.
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
    """Take the lock of a folder. ServeError: another server has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").partition(" ")[0]
        owner = owner if owner.isdecimal() else "unknown"
        raise ServeError(
            f"another server, process {owner}, serves --data-dir {shown_path(folder)}; end it, or "
            "give another folder"
        ) from None

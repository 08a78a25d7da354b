"""Check and repair a data folder that no server uses.

Repair reports every change. It moves damaged files, and files that no row names, to quarantine. A
missing or damaged file is restored from quarantine if an undamaged copy exists there; otherwise its
row is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pcg.errors import PcgError, ServeError, StoreError
from pcg.files import (
    SUMS,
    check_sums,
    drop_files,
    is_directory,
    is_file,
    read_sums,
    sha256_of,
    shown_path,
)
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.runtime.training.checkpoints import OPTIMIZER, STATE, check_checkpoint
from pcg.serve.store.contents import (
    INCOMING,
    QUARANTINE,
    named_paths,
    recorded_removals,
    relative,
    to_quarantine,
)
from pcg.serve.store.database import connect
from pcg.serve.store.store import (
    DATABASE,
    IDENTITY,
    KEPT,
    LOCK,
    begin_use,
    end_use,
    has_foreign_log,
    locked,
    open_database,
    reason_of,
    write_identity,
)
from pcg.serve.store.tables import data_name
from pcg.source import TEMPLATE

_CHECKPOINT = "checkpoint of a job"
_FORGET = (
    "DELETE FROM upload_parts WHERE 'files/' || substr(digest, 1, 2) || '/' || digest = ?1",
    "DELETE FROM files WHERE 'files/' || substr(digest, 1, 2) || '/' || digest = ?1",
    "DELETE FROM models WHERE folder = ?1",
    "DELETE FROM tinker_checkpoints WHERE folder = ?1",
    "DELETE FROM tinker_samplers WHERE path IS NULL AND folder = ?1",
    "UPDATE tinker_models SET state = NULL, status = 'closed' WHERE state = ?1",
    "UPDATE jobs SET status = 'failed', finished_s = ?2, error = ?3 WHERE 'jobs/' || id = ?1 "
    "AND finished_s IS NULL",
)
_LOST = {"code": "data_lost", "message": "the job's folder was lost; repeat the job", "param": None}


def check_folder(data_dir: Path, say: Callable[[str], None], *, repairs: bool) -> int:
    """Compare the rows of a data folder with its files, and repair differences on request.

    Args:
        say: prints a line for each difference and each repair.
    Returns:
        The number of differences that remain.
    Raises:
        ServeError: it is not a data folder, a server uses it, or a newer pcg wrote it.
    """
    if not is_directory(data_dir):
        raise ServeError(f"{shown_path(data_dir)} is not a folder; give a server's --data-dir")
    if not any((data_dir / name).exists() for name in (LOCK, DATABASE, IDENTITY, *KEPT)):
        raise ServeError(f"{shown_path(data_dir)} has no {DATABASE}; give the folder of --data-dir")
    with locked(data_dir) as (folder, _):
        try:
            connection = open_database(folder, is_checked=False)
        except (PcgError, sqlite3.Error) as error:
            if not repairs:
                say(f"{error}")
                return 1
            connection = _repaired_database(folder, error, say)
        with contextlib.closing(connection):
            if repairs:
                begin_use(connection, folder)
            try:
                wrong = _Check(connection, folder, say, repairs).run()
            except sqlite3.OperationalError as error:  # the newer tables are missing
                raise ServeError(
                    f"{shown_path(folder / DATABASE)} is of an older pcg ({error}): serve it once "
                    "with this version, or run --repair"
                ) from error
            except OSError as error:
                raise ServeError(
                    f"{shown_path(folder)} cannot be read or repaired: {reason_of(error)}; repair "
                    "the access, and check again"
                ) from error
        end_use(folder)
        return wrong


def _quarantine(folder: Path, paths: Iterable[Path], say: Callable[[str], None]) -> None:
    for path in paths:
        if os.path.lexists(path):
            say(f"  moved to {to_quarantine(folder, path).relative_to(folder)}")


def _repaired_database(
    folder: Path, error: Exception, say: Callable[[str], None]
) -> sqlite3.Connection:
    """Open a damaged database or create a new one; move unreadable files to quarantine."""
    say(f"{error}")
    _quarantine(folder, [folder / n for n in (SUMS, IDENTITY) if is_directory(folder / n)], say)
    (folder / SUMS).unlink(missing_ok=True)
    path = folder / DATABASE
    log = (path.with_name(f"{DATABASE}-wal"), path.with_name(f"{DATABASE}-shm"))
    if is_file(path) and has_foreign_log(folder):
        _quarantine(folder, log, say)
    row = None
    try:
        if not is_file(path) or not path.stat().st_size:  # SQLite would remove its log
            raise sqlite3.DatabaseError("it is empty")
        with contextlib.closing(connect(path, is_read_only=True)) as connection:
            (state,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
            if state != "ok" or "files" not in tables:
                raise sqlite3.DatabaseError(state)
            if "identity" in tables:
                row = connection.execute("SELECT id FROM identity").fetchone()
    except sqlite3.Error:
        _quarantine(folder, (path, *log), say)
        (folder / IDENTITY).unlink(missing_ok=True)
        say("  a new database was created; the folder's files move to quarantine")
        return connect(path)
    if row is not None:
        write_identity(folder, row["id"])
    say("  the database is undamaged, and the folder now has its id")
    return connect(path)


@dataclass(frozen=True)
class _Check:
    """Comparison of rows with the files that they name; methods count remaining differences."""

    connection: sqlite3.Connection
    folder: Path
    say: Callable[[str], None]
    repairs: bool

    def run(self) -> int:
        named = named_paths(self.connection)
        wrong = self._named(named) + self._data() + self._checkpoints(named)
        unnamed = self._unnamed(named)
        for path in unnamed:
            self.say(f"{path.relative_to(self.folder)} is named by no row")
            if self.repairs:
                self._move(path)
        return wrong + (0 if self.repairs else len(unnamed))

    def _move(self, path: Path) -> None:
        self.say(f"  moved to {to_quarantine(self.folder, path).relative_to(self.folder)}")

    def _named(self, named: Mapping[str, str]) -> int:
        wrong = 0
        for path, what in named.items():
            place = self.folder / path
            problem = _problem(place, what)
            if problem is None:
                continue
            self.say(f"{what}: {problem}")
            if not self.repairs:
                wrong += 1
                continue
            if os.path.lexists(place):
                self._move(place)
            copies = _in_quarantine(self.folder, path)
            whole = next((copy for copy in copies if _problem(copy, what) is None), None)
            if whole is None:
                self._forget(path)
                self.say(f"  forgotten: {what}")
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                whole.rename(place)
                self.say(f"  put back from {whole.relative_to(self.folder)}")
        return wrong

    def _checkpoints(self, named: Mapping[str, str]) -> int:
        wrong = 0
        jobs = self.connection.execute("SELECT id FROM jobs WHERE finished_s IS NULL")
        folders = (self.folder / "jobs" / id / "checkpoints" for (id,) in jobs)
        for path in sorted(p for f in folders for p in f.glob("step-*") if _has_state(p)):
            problem = _problem(path, _CHECKPOINT)
            if problem is None:
                continue
            self.say(f"{_CHECKPOINT}: {problem}")
            if not self.repairs:
                wrong += 1
                continue
            # The adapter of a served checkpoint is undamaged, and stays.
            is_served = str(path.relative_to(self.folder)) in named
            kept = CONFIG, WEIGHTS, TEMPLATE, SUMS
            files = [file for file in path.iterdir() if file.name not in kept]
            for moved in files if is_served else (path,):
                self._move(moved)
            drop_files(path, (STATE, OPTIMIZER))
            self.say("  the job resumes from the previous checkpoint")
        return wrong

    def _forget(self, path: str) -> None:
        """Remove the rows of a lost path, and fail its job."""
        for statement in _FORGET:
            values = (path, int(time.time()), json.dumps(_LOST))
            self.connection.execute(statement, values[: 3 if "?2" in statement else 1])

    def _data(self) -> int:
        """Compare the data of unfinished jobs with its digests."""
        wrong = 0
        jobs = self.connection.execute(
            "SELECT job, group_concat(digest) FROM (SELECT job, digest FROM job_data JOIN jobs "
            "ON jobs.id = job WHERE finished_s IS NULL ORDER BY job_data.rowid) GROUP BY job"
        ).fetchall()
        for id, digests in jobs:
            place = self.folder / "jobs" / id
            for index, digest in enumerate(digests.split(",")):
                path = place / data_name(index)
                if not place.exists() or (is_file(path) and sha256_of(path) == digest):
                    continue
                self.say(f"job {id}: {path.name} differs from the uploaded file")
                if not self.repairs:
                    wrong += 1
                    continue
                content = self.folder / relative(digest)
                if path.exists():
                    self._move(path)
                if _problem(content, "file") is None:
                    os.link(content, path)
                    self.say(f"  put back from {content.relative_to(self.folder)}")
                else:
                    self._forget(f"jobs/{id}")
                    self.say("  the job has failed")
        return wrong

    def _unnamed(self, named: Mapping[str, str]) -> list[Path]:
        """Return files and folders that neither a row nor a record of removals names."""
        folder, execute = self.folder, self.connection.execute
        known = {*named, *recorded_removals(self.connection)}
        known |= {f"jobs/{id}" for (id,) in execute("SELECT id FROM jobs")}
        known |= {f"jobs/{job}" for (job,) in execute("SELECT job FROM job_folders")}
        known |= {"/".join(path.split("/")[:2]) for path in named if path.startswith("jobs/")}
        paths = [*folder.glob("files/*/*"), *folder.glob("jobs/*"), *folder.glob("tinker/*")]
        paths += [path for path in map(folder.joinpath, (*KEPT, INCOMING)) if is_file(path)]
        return sorted(path for path in paths if str(path.relative_to(folder)) not in known)


def _problem(path: Path, what: str) -> str | None:
    """Return the fault of a file, an adapter, a state or a checkpoint, or None."""
    shown = f"{path.parent.name}/{path.name}"
    if not path.exists():
        return f"{shown} is missing"
    is_folder = not what.startswith(("file", "part of upload"))
    if path.is_dir() is not is_folder:
        return f"{shown} is not a {'folder' if is_folder else 'file'}"
    if is_folder:
        try:
            if what == _CHECKPOINT or what.startswith("state of") or "/weights/" in what:
                check_checkpoint(path)
            elif not what.startswith("job "):
                lost = [name for name in (CONFIG, WEIGHTS) if not is_file(path / name)]
                if lost:  # older folders have no SHA256SUMS to compare
                    return f"{shown}/{lost[0]} is missing"
                check_sums(path, (CONFIG, WEIGHTS), StoreError)
        except PcgError as error:
            return str(error).partition(";")[0]
    elif sha256_of(path) != path.name.partition(".")[0]:
        return f"{shown} is damaged: its SHA-256 is not its name"
    return None


def _in_quarantine(folder: Path, path: str) -> Iterator[Path]:
    """Yield the copies of a path in quarantine, the newest first."""
    place = Path(path)
    for day in sorted((folder / QUARANTINE).glob("*"), reverse=True):
        yield from sorted((day / place.parent).glob(f"{place.name}*"), reverse=True)


def _has_state(path: Path) -> bool:
    """Return True if a folder has a job's state, even if it is damaged."""
    try:
        return is_file(path / STATE) or STATE in (read_sums(path, StoreError) or {})
    except StoreError:
        return True

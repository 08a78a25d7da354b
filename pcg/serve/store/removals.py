"""Removal of what no row names: deleted where a record says so, and else put in quarantine.

The table `removed` has the paths, relative to the data folder, that rows named until they were
deleted (the schema's triggers write it with the deletion), and those that are being made. What no
row names and no record tells of, as after the database was put back from a copy, may be all that is
left of somebody's data: it moves to `quarantine/<date>/`, below its path, and is never deleted.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from pcg.files import shown_path, sync_names
from pcg.serve.store.database import Database

QUARANTINE = "quarantine"
_LOG = logging.getLogger("pcg.serve")


def note(connection: sqlite3.Connection, path: str) -> None:
    """Note a path that no row names yet, so that it is removed if none ever does."""
    connection.execute(
        "INSERT OR REPLACE INTO removed (path, removed_s) VALUES (?, ?)", (path, int(time.time()))
    )


def recorded(connection: sqlite3.Connection) -> set[str]:
    """Return the paths that a record tells of."""
    return {path for (path,) in connection.execute("SELECT path FROM removed")}


def forget(connection: sqlite3.Connection, paths: Collection[str]) -> None:
    """Remove the records of paths, which are gone or named again."""
    connection.executemany("DELETE FROM removed WHERE path = ?", [(path,) for path in paths])


def discard(database: Database, folder: Path, unnamed: Iterable[Path]) -> None:
    """Delete paths that a record tells of, and move the others to quarantine.

    Args:
        folder: the data folder.
        unnamed: paths in it that no row names.
    """
    known = database.read(recorded).result()
    moved = []
    for path in unnamed:
        if str(path.relative_to(folder)) in known:
            remove(path)
            continue
        try:
            moved.append(to_quarantine(folder, path))
        except OSError as error:  # a full disk: it stays where it is
            _LOG.error("%s cannot be moved to quarantine: %s", shown_path(path), error)
    if moved:
        _LOG.warning(
            "%d files and folders that no row of the database names were moved to quarantine, "
            "such as %s; `pcg data check` tells more",
            *(len(moved), shown_path(moved[0])),
        )


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def to_quarantine(folder: Path, path: Path) -> Path:
    """Move a path of a data folder to its quarantine; returns where it is."""
    place = folder / QUARANTINE / time.strftime("%Y-%m-%d") / path.relative_to(folder)
    free, count = place, 0
    while os.path.lexists(free):
        count += 1
        free = place.with_name(f"{place.name}.{count}")
    free.parent.mkdir(parents=True, exist_ok=True)
    path.rename(free)
    sync_names(free.parent)
    return free

"""The paths of a data folder that rows name."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from pcg.serve.store.contents import relative

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
    """Return what each path is that a row names, relative to the data folder."""
    found = {relative(digest): what for digest, what in connection.execute(_CONTENTS)}
    for query in _FOLDERS:
        found |= dict(iter(connection.execute(query)))
    return found


def missing(folder: Path, named: Mapping[str, str]) -> dict[str, int]:
    """Count paths that are not there by the folder that has them; -1 where none of them is."""
    total, lost = dict[str, int](), dict[str, int]()
    for path in named:
        kind = path.partition("/")[0]
        total[kind] = total.get(kind, 0) + 1
        lost[kind] = lost.get(kind, 0) + (not (folder / path).exists())
    return {kind: -1 if count == total[kind] else count for kind, count in lost.items()}

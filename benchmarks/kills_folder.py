"""What is in the folder of a server that ended: every file has its row, and every row its files."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from pcg.serve.store.store import DATABASE

UNFINISHED = ("queued", "running", "paused")
OF_JOBS = {"checkpoints", "model", "record"}
"""What the folder of a job that is over has."""


@contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the database of a folder that no server has."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        yield connection


def wrong_in(folder: Path) -> list[str]:
    """Return what is wrong in a folder, in words."""
    with opened(folder) as connection:
        return [*_database(connection), *_contents(folder, connection), *_jobs(folder, connection),
                *_tinker(folder, connection)]  # fmt: skip


def _column(connection: sqlite3.Connection, select: str) -> set[Any]:
    return {one for (one,) in connection.execute(select)}


def _database(connection: sqlite3.Connection) -> Iterator[str]:
    (state,) = connection.execute("PRAGMA integrity_check").fetchone()
    if state != "ok":
        yield f"the database: {state}"
    for row in connection.execute("PRAGMA foreign_key_check"):
        yield f"a row without the one that it names: {row}"
    ids = "SELECT job, type, step, COUNT(*) AS n FROM job_events WHERE step IS NOT NULL "
    for row in connection.execute(f"{ids} GROUP BY job, type, step HAVING n > 1"):
        yield f"an event that is there twice: {row}"
    left = "request IS NOT NULL AND (state = 'pending' OR kind = 'sample' OR stream IN "
    closed = "(SELECT id FROM tinker_models WHERE status = 'closed'))"
    for row in connection.execute(
        f"SELECT id, kind, state FROM tinker_futures WHERE {left}{closed}"
    ):
        yield f"a request that nobody needs, or that was not done: {row}"


def _contents(folder: Path, connection: sqlite3.Connection) -> Iterator[str]:
    named = _column(connection, "SELECT digest FROM files UNION SELECT digest FROM upload_parts")
    there = {path.name: path for path in (folder / "files").glob("*/*")}
    if set(there) != named:
        yield f"contents {set(there) ^ named} have no row, or rows no content"
    for name, path in there.items():
        if hashlib.sha256(path.read_bytes()).hexdigest() != name:
            yield f"the content {name} is another one"
    for path in (folder / "incoming").iterdir():
        yield f"{path.name} is in incoming"


def _jobs(folder: Path, connection: sqlite3.Connection) -> Iterator[str]:
    active = "', '".join(UNFINISHED)
    over = _column(connection, f"SELECT id FROM jobs WHERE status NOT IN ('{active}')")
    rows = _column(connection, "SELECT id FROM jobs")
    models = _column(connection, "SELECT folder FROM models")
    holding = _column(connection, "SELECT job FROM job_folders")
    for path in (folder / "jobs").iterdir():
        if path.name not in rows | holding:
            yield f"{path.name} has no row"
        elif path.name in over:
            for found in path.iterdir():
                if found.name not in OF_JOBS:
                    yield f"{path.name}, which is over, has {found.name}"
            for found in (path / "checkpoints").glob("*"):
                if f"jobs/{path.name}/checkpoints/{found.name}" not in models:
                    yield f"{path.name} has {found.name}, which no model's row names"
            for found in path.glob("**/optimizer.safetensors"):
                yield f"{path.name}, which is over, has {found.relative_to(path)}"
        for found in [*path.glob("**/.saving-*"), *path.glob("**/.step-*")]:
            yield f"{path.name} has {found.relative_to(path)}"
    for name in models:
        if not (folder / name / "adapter_model.safetensors").is_file():
            yield f"the model in {name} has no weights"
    for job in _column(connection, "SELECT job FROM job_data") & over:
        yield f"{job}, which is over, holds data"
    for job, size in connection.execute("SELECT job, size_bytes FROM job_folders"):
        files = [one for one in (folder / "jobs" / job).glob("**/*") if one.is_file()]
        found = sum(one.stat().st_size for one in files)
        if job in over and found != size:
            yield f"{job} has {found} bytes, and its row says {size}"


def _tinker(folder: Path, connection: sqlite3.Connection) -> Iterator[str]:
    named = _column(
        connection,
        "SELECT state FROM tinker_models WHERE state IS NOT NULL UNION "
        "SELECT folder FROM tinker_checkpoints UNION SELECT folder FROM tinker_samplers "
        "WHERE path IS NULL AND folder IS NOT NULL",
    )
    there = {f"tinker/{one.name}" for one in (folder / "tinker").iterdir()}
    if there != named:
        yield f"folders {there ^ named} of tinker have no row, or rows no folder"


def folders_of_models(folder: Path) -> dict[str, Path]:
    """Return the folder of the adapter of each job that succeeded, by the job's id."""
    with opened(folder) as connection:
        rows = connection.execute(
            "SELECT jobs.id, models.folder FROM jobs JOIN models USING (tenant, name)"
        )
        return {id: folder / found for id, found in rows}


def folders_of_checkpoints(folder: Path) -> dict[str, Path]:
    """Return the folder of each checkpoint of Tinker's protocol, by its path."""
    with opened(folder) as connection:
        rows = connection.execute("SELECT path, folder FROM tinker_checkpoints")
        return {path: folder / found for path, found in rows}


ADAPTER, OPTIMIZER, STATE = (
    "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json",
)  # fmt: skip


def farthest(one: Path, other: Path, name: str) -> float:
    """Return the largest difference of the tensors of a file that two folders have, or neither.

    That of the adapter's weights is absolute, that of an optimizer's tensors a share of the largest
    number in each.
    """
    if (one / name).is_file() != (other / name).is_file():
        raise ValueError(f"one of {one} and {other} has no {name}")
    if not (one / name).is_file():
        return 0.0
    ours, others = load_file(one / name), load_file(other / name)
    if set(ours) != set(others):
        raise ValueError(f"{one} and {other} have other tensors in {name}")
    worst = 0.0
    for key, tensor in ours.items():
        far = abs(tensor.astype("f8") - others[key].astype("f8")).max(initial=0.0)
        scale = abs(others[key]).max(initial=0.0) if name == OPTIMIZER else 1.0
        worst = max(worst, float(far / (scale or 1.0)))
    return worst


def updates_of(folder: Path) -> int | None:
    """Return how many updates a state had; None for an adapter alone."""
    path = folder / STATE
    return int(json.loads(path.read_text())["state"]["step"]) if path.is_file() else None

"""Rows of events and checkpoints of jobs: each step has one, however often a job began again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.serve.files.records import Page
from pcg.serve.files.wire import now
from pcg.serve.store.ids import new_key

MESSAGE, METRICS, CHECKPOINT = "message", "metrics", "checkpoint"
"""Types of events; those of checkpoints are messages for clients."""


@dataclass(frozen=True)
class EventRecord:
    """An event of a job; `data` is JSON."""

    id: str
    created_s: int
    level: str
    type: str
    message: str
    data: str | None


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint of a job that is served by its model's name; `metrics` is JSON."""

    id: str
    job: str
    created_s: int
    step: int
    model: str
    metrics: str


def say(connection: sqlite3.Connection, job: str, message: str, level: str = "info") -> None:
    """Add a message to a job's events."""
    add(connection, job, MESSAGE, message, level=level)


def add(
    connection: sqlite3.Connection,
    job: str,
    type: str,
    message: str,
    data: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    level: str = "info",
) -> bool:
    """Add an event; returns False if its step has one of the type already."""
    done = connection.execute(
        "INSERT OR IGNORE INTO job_events (id, job, created_s, level, type, message, data, step) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            new_key("ftevent-"),
            job,
            now(),
            level,
            type,
            message,
            None if data is None else json.dumps(data),
            step,
        ),
    )
    return done.rowcount == 1


def listed(connection: sqlite3.Connection, job: str, page: Page) -> list[EventRecord]:
    """Return a page of a job's events, and one more where there are others."""
    behind, values = page.condition()
    rows = connection.execute(
        "SELECT id, created_s, level, type, message, data FROM job_events "
        f"WHERE job = ? AND {behind} {page.order}",
        (job, *values),
    )
    return [EventRecord(*row) for row in rows]


def metrics(connection: sqlite3.Connection, job: str) -> list[dict[str, Any]]:
    """Return the metrics of a job's steps, in the order of the steps."""
    rows = connection.execute(
        "SELECT data FROM job_events WHERE job = ? AND type = ? ORDER BY step", (job, METRICS)
    )
    return [json.loads(data) for (data,) in rows]


def add_checkpoint(
    connection: sqlite3.Connection, job: str, step: int, model: str, found: Mapping[str, Any]
) -> bool:
    """Add a checkpoint, and its event; returns False if it is there already."""
    message = f"Checkpoint created at step {step}"
    if not add(connection, job, CHECKPOINT, message, {"step": step}, step=step):
        return False
    connection.execute(
        "INSERT INTO job_checkpoints (id, job, created_s, step, model, metrics) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (new_key("ftckpt_"), job, now(), step, model, json.dumps(found)),
    )
    return True


def checkpoints(
    connection: sqlite3.Connection, job: str, page: Page | None = None
) -> list[CheckpointRecord]:
    """Return a page of a job's checkpoints, or all, that of the last step first."""
    page = Page(None, 2**31, is_rising=False) if page is None else page
    rows = connection.execute(
        "SELECT id, job, created_s, step, model, metrics FROM job_checkpoints WHERE job = ?1 AND "
        "(?2 IS NULL OR step < (SELECT step FROM job_checkpoints WHERE id = ?2)) "
        "ORDER BY step DESC LIMIT ?3",
        (job, page.after, page.limit + 1),
    )
    return [CheckpointRecord(*row) for row in rows]


def remove_checkpoint(connection: sqlite3.Connection, id: str) -> None:
    """Forget a checkpoint."""
    connection.execute("DELETE FROM job_checkpoints WHERE id = ?", (id,))

"""Rows of events and checkpoints of jobs: each step has one, however often a job began again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.serve.files.records import Page
from pcg.serve.store.tables import Table, new_key, now

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


_EVENTS = Table("job_events", EventRecord)
_CHECKPOINTS = Table("job_checkpoints", CheckpointRecord)


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
    return _EVENTS.select(connection, behind, values, page.order, job=job)


def metrics(connection: sqlite3.Connection, job: str) -> list[dict[str, Any]]:
    """Return the metrics of a job's steps, in the order of the steps."""
    rows = _EVENTS.read(connection, "data", order="ORDER BY step", job=job, type=METRICS)
    return [json.loads(data) for (data,) in rows]


def add_checkpoint(
    connection: sqlite3.Connection, job: str, step: int, model: str, found: Mapping[str, Any]
) -> bool:
    """Add a checkpoint, and its event; returns False if it is there already."""
    message = f"Checkpoint created at step {step}"
    if not add(connection, job, CHECKPOINT, message, {"step": step}, step=step):
        return False
    record = CheckpointRecord(new_key("ftckpt_"), job, now(), step, model, json.dumps(found))
    _CHECKPOINTS.insert(connection, record)
    return True


def checkpoints(
    connection: sqlite3.Connection, job: str, page: Page | None = None
) -> list[CheckpointRecord]:
    """Return a page of a job's checkpoints, or all, that of the last step first."""
    page = Page(None, 2**31, is_rising=False) if page is None else page
    behind = "step < (SELECT step FROM job_checkpoints WHERE id = ?)"
    return _CHECKPOINTS.select(
        connection,
        "1" if page.after is None else behind,
        () if page.after is None else (page.after,),
        f"ORDER BY step DESC LIMIT {page.limit + 1}",
        job=job,
    )


def remove_checkpoint(connection: sqlite3.Connection, id: str) -> None:
    """Forget a checkpoint."""
    _CHECKPOINTS.delete(connection, id=id)

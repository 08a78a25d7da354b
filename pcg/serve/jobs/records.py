"""Rows of jobs, their events, checkpoints and permissions; and the bases of their models.

A step has one event of each type, however often a job was resumed. An adapter gives nonsense on
another base, so a store with models refuses a server with other weights.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.errors import ServeError
from pcg.files import shown_path
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.files.files import Page
from pcg.serve.http.errors import ApiError
from pcg.serve.store.store import Store
from pcg.serve.store.tables import Table, new_key, now

QUEUED, RUNNING, PAUSED = "queued", "running", "paused"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ACTIVE = (QUEUED, RUNNING)
UNFINISHED = (QUEUED, RUNNING, PAUSED)
OVER = (SUCCEEDED, FAILED, CANCELLED)
MESSAGE, METRICS, CHECKPOINT = "message", "metrics", "checkpoint"
"""Types of events; clients see checkpoint events as messages."""
_MOST_PERMISSIONS = 256
"""The most permissions of a model."""
_WHOLE = "sha256:"
"""Prefix of digests of all weights; an older pcg digested samples, which identify no base."""


@dataclass(frozen=True)
class JobRecord:
    """A job.

    Attributes:
        model: the client's name of the model to start from.
        name: name of the trained model.
        metadata: JSON of the client's pairs; None without any.
        config: JSON of the resolved configuration.
        trained_tokens: tokens processed; None until the job succeeds.
        result_file: id of the file with the metrics; None until the job succeeds.
        error: JSON of `code`, `message` and `param`, of a failed job.
        base: digest of the base's weights.
        config_bytes: size of the configuration, which counts in the tenant's quota.
    """

    id: str
    tenant: str
    model: str
    name: str
    status: str
    created_s: int
    finished_s: int | None
    training_file: str
    validation_file: str | None
    seed: int
    metadata: str | None
    config: str
    trained_tokens: int | None = None
    result_file: str | None = None
    error: str | None = None
    base: str | None = None
    config_bytes: int = 0

    @property
    def resolved(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.config)
        return config


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
    """A served checkpoint of a job; `model` is its model name, and `metrics` is JSON."""

    id: str
    job: str
    created_s: int
    step: int
    model: str
    metrics: str


@dataclass(frozen=True)
class PermissionRecord:
    """A permission.

    Attributes:
        tenant: the owner of the model.
        project: the tenant that may use it.
    """

    id: str
    tenant: str
    model: str
    project: str
    created_s: int


JOBS = Table("jobs", JobRecord)
EVENTS = Table("job_events", EventRecord)
CHECKPOINTS = Table("job_checkpoints", CheckpointRecord)
PERMISSIONS = Table("checkpoint_permissions", PermissionRecord)


def find(connection: sqlite3.Connection, id: str, tenant: str | None = None) -> JobRecord | None:
    """Return a job, of a tenant or of any; None for an unknown id."""
    return JOBS.find(connection, id=id, **({} if tenant is None else {"tenant": tenant}))


def listed(
    connection: sqlite3.Connection,
    tenant: str,
    page: Page,
    metadata: Mapping[str, str],
    *,
    without_metadata: bool,
) -> list[JobRecord]:
    """Return a page of a tenant's jobs, and a further job if more follow.

    Args:
        metadata: pairs that a job must have.
        without_metadata: list only jobs without metadata.
    """
    behind, values = page.condition()
    conditions = [behind, *(["metadata IS NULL"] if without_metadata else [])]
    for pair in metadata.items():
        conditions.append(
            "EXISTS (SELECT 1 FROM json_each(jobs.metadata) "
            "WHERE json_each.key = ? AND json_each.value = ?)"
        )
        values += pair
    return JOBS.select(connection, " AND ".join(conditions), values, page.order, tenant=tenant)


def of_status(connection: sqlite3.Connection, statuses: Sequence[str]) -> list[JobRecord]:
    """Return all tenants' jobs with any of the statuses, the oldest first."""
    return JOBS.select(connection, among(statuses), statuses, "ORDER BY id")


def among(statuses: Sequence[str]) -> str:
    """Return the condition of rows with any of the statuses."""
    return f"status IN ({', '.join('?' for _ in statuses)})"


def change(
    connection: sqlite3.Connection, id: str, before: Sequence[str], **columns: str | int | None
) -> JobRecord | None:
    """Change a job that has any of the statuses `before`; return the job, or None if it has not."""
    changed = JOBS.change(connection, columns, among(before), before, id=id)
    return find(connection, id) if changed else None


def say(connection: sqlite3.Connection, job: str, message: str, level: str = "info") -> None:
    """Add a message to a job's events."""
    add_event(connection, job, MESSAGE, message, level=level)


def add_event(
    connection: sqlite3.Connection,
    job: str,
    type: str,
    message: str,
    data: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    level: str = "info",
) -> bool:
    """Add an event; return False if the step already has an event of the type."""
    text = None if data is None else json.dumps(data)
    inserted = connection.execute(
        "INSERT OR IGNORE INTO job_events (id, job, created_s, level, type, message, data, step) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (new_key("ftevent-"), job, now(), level, type, message, text, step),
    )
    return inserted.rowcount == 1


def metrics(connection: sqlite3.Connection, job: str) -> list[dict[str, Any]]:
    """Return the metrics of a job's steps, in the order of the steps."""
    rows = EVENTS.read(connection, "data", order="ORDER BY step", job=job, type=METRICS)
    return [json.loads(data) for (data,) in rows]


def add_checkpoint(
    connection: sqlite3.Connection, job: str, step: int, model: str, values: Mapping[str, Any]
) -> bool:
    """Add a checkpoint with its metrics, and its event; return False if it exists."""
    message = f"Checkpoint created at step {step}"
    if not add_event(connection, job, CHECKPOINT, message, {"step": step}, step=step):
        return False
    record = CheckpointRecord(
        new_key("ftckpt_"), job, now(), step=step, model=model, metrics=json.dumps(values)
    )
    CHECKPOINTS.insert(connection, record)
    return True


def checkpoints(
    connection: sqlite3.Connection, job: str, page: Page | None = None
) -> list[CheckpointRecord]:
    """Return a page of a job's checkpoints, or all, the last step first."""
    condition, values, end = "1", list[str](), ""
    if page is not None:
        end = f"LIMIT {page.limit + 1}"
        if page.after is not None:
            condition = "step < (SELECT step FROM job_checkpoints WHERE id = ?)"
            values = [page.after]
    return CHECKPOINTS.select(connection, condition, values, f"ORDER BY step DESC {end}", job=job)


def permit(
    connection: sqlite3.Connection, permissions: Sequence[PermissionRecord]
) -> list[PermissionRecord]:
    """Add permissions of a model; return them, with the existing rows of repeated permissions.

    ApiError: the model would have too many.
    """
    rows = []
    for permission in permissions:
        PERMISSIONS.insert(connection, permission, "OR IGNORE")
        key = {name: getattr(permission, name) for name in ("tenant", "model", "project")}
        rows += PERMISSIONS.select(connection, **key)
    first = permissions[0]
    count = PERMISSIONS.count(connection, tenant=first.tenant, model=first.model)
    if count > _MOST_PERMISSIONS:
        raise ApiError(
            400,
            f"The model would have {count} permissions, and may have {_MOST_PERMISSIONS}; delete "
            "some.",
            param="project_ids",
        )
    return rows


def check_base(store: Store, facts: ModelFacts) -> None:
    """Record the served base, on which jobs will train.

    Raises:
        ServeError: the store has models, unfinished jobs or Tinker checkpoints of another base.
    """
    digest = facts.base_digest

    def act(connection: sqlite3.Connection) -> tuple[str, int] | None:
        other = _base_of_jobs(connection, digest) or _base_of_tinker(connection, digest)
        if other is None:
            connection.execute(
                "INSERT OR REPLACE INTO bases (digest, name) VALUES (?, ?)", (digest, facts.name)
            )
        return other

    other = store.database.write(act, may_use_reserve=True).result()
    if other is not None:
        name, count = other
        raise ServeError(
            f"--data-dir {shown_path(store.folder)} has {count} models, checkpoints and unfinished "
            f"jobs that were trained on other weights, of {name!r}, and this server serves "
            f"{facts.name!r}: serve those weights, or give another --data-dir"
        )


def _base_of_jobs(connection: sqlite3.Connection, digest: str) -> tuple[str, int] | None:
    """Return the name of another base of models and unfinished jobs, and their number, or None."""
    row: tuple[str, int] | None = connection.execute(
        "SELECT bases.name, COUNT(*) FROM (SELECT base FROM models UNION ALL "
        f"SELECT base FROM jobs WHERE {among(UNFINISHED)}) AS used "
        "JOIN bases ON bases.digest = used.base WHERE used.base != ? AND used.base LIKE ? "
        "GROUP BY bases.digest",
        (*UNFINISHED, digest, f"{_WHOLE}%"),
    ).fetchone()
    return row


def _base_of_tinker(connection: sqlite3.Connection, digest: str) -> tuple[str, int] | None:
    """Return the name of another base of Tinker's objects, and their number, or None.

    All of Tinker's objects have the last served base, as a server refuses another base.
    """
    last = connection.execute(
        "SELECT digest, name FROM bases ORDER BY rowid DESC LIMIT 1"
    ).fetchone()
    if last is None or last[0] == digest or not last[0].startswith(_WHOLE):
        return None
    (count,) = connection.execute(
        "SELECT (SELECT COUNT(*) FROM tinker_models WHERE status = 'open') + "
        "(SELECT COUNT(*) FROM tinker_checkpoints WHERE expires_s IS NULL OR expires_s > ?) + "
        "(SELECT COUNT(*) FROM tinker_samplers WHERE path IS NULL AND folder IS NOT NULL)",
        (now(),),
    ).fetchone()
    return (str(last[1]), int(count)) if count else None

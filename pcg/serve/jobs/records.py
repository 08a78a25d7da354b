"""Rows of jobs: what each is to do, and how far it is."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.serve.files.records import Page
from pcg.serve.store.tables import Table

QUEUED, RUNNING, PAUSED = "queued", "running", "paused"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ACTIVE = (QUEUED, RUNNING)
UNFINISHED = (QUEUED, RUNNING, PAUSED)


@dataclass(frozen=True)
class JobRecord:
    """A job.

    Attributes:
        model: what it trains on, as the client named it.
        name: the name of the model that it makes.
        metadata: JSON of the client's pairs; None without any.
        config: JSON of the resolved configuration.
        trained_tokens: tokens that went through the model; None until it succeeds.
        result_file: the id of the file with its metrics, once it succeeded.
        error: JSON of `code`, `message` and `param`, of one that failed.
        base: the digest of the weights that it trains on.
        config_bytes: the size of its configuration, which counts in its tenant's quota.
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
        """The resolved configuration."""
        found: dict[str, Any] = json.loads(self.config)
        return found


JOBS = Table("jobs", JobRecord)


def find(connection: sqlite3.Connection, id: str, tenant: str | None = None) -> JobRecord | None:
    """Return a job, of a tenant's own if one is given; None without."""
    return JOBS.find(connection, id=id, **({} if tenant is None else {"tenant": tenant}))


def listed(
    connection: sqlite3.Connection,
    tenant: str,
    page: Page,
    metadata: Mapping[str, str] | None,
    *,
    without_metadata: bool,
) -> list[JobRecord]:
    """Return a page of a tenant's jobs, and one more where there are others.

    Args:
        metadata: pairs that a job has; None for any.
        without_metadata: only those that have none.
    """
    behind, values = page.condition()
    conditions, more = ["metadata IS NULL"] if without_metadata else [], list[str]()
    for key, value in (metadata or {}).items():
        conditions.append(
            "EXISTS (SELECT 1 FROM json_each(jobs.metadata) "
            "WHERE json_each.key = ? AND json_each.value = ?)"
        )
        more += [key, value]
    condition = " AND ".join([behind, *conditions])
    return JOBS.select(connection, condition, (*values, *more), page.order, tenant=tenant)


def of_status(connection: sqlite3.Connection, statuses: Sequence[str]) -> list[JobRecord]:
    """Return all tenants' jobs of some statuses, the oldest first."""
    return JOBS.select(connection, _among(statuses), statuses, "ORDER BY id")


def count_unfinished(connection: sqlite3.Connection, tenant: str) -> int:
    """Count a tenant's jobs that are not over."""
    return JOBS.count(connection, _among(UNFINISHED), UNFINISHED, tenant=tenant)


def _among(statuses: Sequence[str]) -> str:
    return f"status IN ({', '.join('?' for _ in statuses)})"


def change(
    connection: sqlite3.Connection, id: str, before: Sequence[str], **columns: str | int | None
) -> JobRecord | None:
    """Change a job that is of one of some statuses; returns it, or None if it is of another."""
    changed = JOBS.change(connection, columns, _among(before), before, id=id)
    return find(connection, id) if changed else None

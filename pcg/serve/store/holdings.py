"""Rows of what jobs hold on the disk, which counts in their tenants' quotas.

A job holds the data that it was made with, also when the files are deleted, until it is over; and
its folder holds checkpoints and adapters for as long as it is there, whatever became of the job.
Its row has its configuration, in which a grader may be, until it is deleted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable


def hold_data(
    connection: sqlite3.Connection, job: str, tenant: str, data: Iterable[tuple[str, int]]
) -> None:
    """Note the data of a new job, by digests and bytes."""
    rows = [(job, tenant, digest, size) for digest, size in data]
    connection.executemany(
        "INSERT INTO job_data (job, tenant, digest, size_bytes) VALUES (?, ?, ?, ?)", rows
    )


def release_data(connection: sqlite3.Connection, job: str) -> None:
    """Note that the data of a job is gone from its folder."""
    connection.execute("DELETE FROM job_data WHERE job = ?", (job,))


def data(connection: sqlite3.Connection, job: str) -> set[str]:
    """Return the digests of the data of a job, which are in its folder until it is over."""
    found = connection.execute("SELECT digest FROM job_data WHERE job = ?", (job,))
    return {digest for (digest,) in found}


def holds_data(connection: sqlite3.Connection) -> set[str]:
    """Return the jobs that have data in their folders."""
    return {job for (job,) in connection.execute("SELECT DISTINCT job FROM job_data")}


def hold_folder(connection: sqlite3.Connection, job: str, tenant: str, size_bytes: int) -> None:
    """Note the bytes of the adapters and checkpoints in a job's folder; 0 for none."""
    connection.execute("DELETE FROM job_folders WHERE job = ?", (job,))
    if size_bytes:
        connection.execute(
            "INSERT INTO job_folders (job, tenant, size_bytes) VALUES (?, ?, ?)",
            (job, tenant, size_bytes),
        )


def resize_folder(connection: sqlite3.Connection, job: str, size_bytes: int) -> None:
    """Note the bytes in the folder of a job, which is there or not; 0 for none."""
    connection.execute("UPDATE job_folders SET size_bytes = ?2 WHERE job = ?1", (job, size_bytes))
    connection.execute("DELETE FROM job_folders WHERE job = ? AND size_bytes = 0", (job,))


def folders(connection: sqlite3.Connection) -> set[str]:
    """Return the jobs, of those that are there and others, whose folders hold something."""
    return {job for (job,) in connection.execute("SELECT job FROM job_folders")}


def held_bytes(connection: sqlite3.Connection, tenant: str, now_s: int) -> int:
    """Count the bytes that a tenant's jobs hold, without data that is a file of the tenant's.

    Data that several jobs have is on the disk once.
    """
    (data,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes), 0) FROM (SELECT DISTINCT digest, size_bytes "
        "FROM job_data WHERE tenant = ?1 AND digest NOT IN (SELECT digest FROM files "
        "WHERE tenant = ?1 AND (expires_s IS NULL OR expires_s > ?2)))",
        (tenant, now_s),
    ).fetchone()
    (in_folders,) = connection.execute(
        "SELECT COALESCE(SUM(size_bytes), 0) FROM job_folders WHERE tenant = ?", (tenant,)
    ).fetchone()
    (in_rows,) = connection.execute(
        "SELECT COALESCE(SUM(config_bytes), 0) FROM jobs WHERE tenant = ?", (tenant,)
    ).fetchone()
    return int(data) + int(in_folders) + int(in_rows)

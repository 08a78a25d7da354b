"""Rows of jobs that are over: removed by their tenants, or after a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from pcg.serve.adapters import kept_models
from pcg.serve.files.files import Files
from pcg.serve.files.wire import now
from pcg.serve.jobs import records
from pcg.serve.jobs.endings import in_status
from pcg.serve.jobs.folders import JobFolder, Rows, sweep
from pcg.serve.jobs.records import CANCELLED, FAILED, SUCCEEDED, UNFINISHED, JobRecord
from pcg.serve.store import holdings, removals

OVER = (SUCCEEDED, FAILED, CANCELLED)
_DAY_S = 86_400


def remove_job(connection: sqlite3.Connection, job: JobRecord) -> None:
    """Remove a job that is over, with its events and checkpoints; its models stay.

    ApiError: it is not over.
    """
    found = records.find(connection, job.id)
    if found is not None and found.status not in OVER:
        raise in_status(job.id, found.status, OVER)
    connection.execute("DELETE FROM jobs WHERE id = ?", (job.id,))


def remove_old(connection: sqlite3.Connection, now_s: int, days: float) -> None:
    """Remove the jobs and uploads that have been over for so many days."""
    before_s = now_s - int(days * _DAY_S)
    places = ", ".join("?" for _ in OVER)
    connection.execute(
        f"DELETE FROM jobs WHERE status IN ({places}) AND finished_s < ?", (*OVER, before_s)
    )
    connection.execute(
        "DELETE FROM uploads WHERE status != 'pending' AND expires_s < ?", (before_s,)
    )


async def clean_folders(files: Files, folders: Sequence[Path], days: float) -> None:
    """Remove rows that have been over for so many days, and what no row needs of folders.

    Args:
        folders: those of jobs.
    """

    def act(connection: sqlite3.Connection) -> Rows:
        remove_old(connection, now(), days)
        going_on = {one.id for one in records.of_status(connection, UNFINISHED)}
        return Rows(
            going_on,
            {id for (id,) in connection.execute("SELECT id FROM jobs")} - going_on,
            holdings.holds_data(connection) - going_on,
            holdings.folders(connection),
            kept_models.folders(connection),
        )

    left = await asyncio.to_thread(
        sweep, files.store, folders, await files.write(act, may_use_reserve=True)
    )

    def note(connection: sqlite3.Connection) -> None:
        for job, size in left.items():
            holdings.release_data(connection, job)
            holdings.resize_folder(connection, job, size)

    await files.write(note, may_use_reserve=True)


async def tidy_job(files: Files, job: JobRecord, folder: JobFolder) -> None:
    """Remove what nobody needs of a job that is over, and note what is left; again after a crash.

    Of a job whose row is gone models and checkpoints alone are left.
    """
    found = await files.read(lambda one: records.find(one, job.id))
    if found is not None and found.status in UNFINISHED:
        return
    named = await files.read(kept_models.folders)

    def remove() -> int:
        if found is None:
            folder.strip()
        else:
            folder.tidy()
        for path in folder.unnamed(named):
            removals.remove(path)
        return folder.held_bytes()

    size = await asyncio.to_thread(remove)

    def note(connection: sqlite3.Connection) -> None:
        holdings.release_data(connection, job.id)
        holdings.hold_folder(connection, job.id, job.tenant, size)

    await files.write(note, may_use_reserve=True)

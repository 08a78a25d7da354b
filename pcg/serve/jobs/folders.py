"""Folders of jobs in the server's store, and the removal of unneeded files.

jobs/<id>/training.jsonl        a hard link to the uploaded file, which may be deleted
jobs/<id>/validation.jsonl      and validation-2.jsonl, …, with several files
jobs/<id>/start/                the initial adapter, if the job continues a model
jobs/<id>/checkpoints/          the last checkpoints, each served under a name
jobs/<id>/record/               the training record, as long as the job's row exists
jobs/<id>/model/                the trained adapter
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcg.errors import FinetuneError, StoreDamagedError
from pcg.files import (
    check_sums,
    drop_files,
    is_file,
    read_json,
    read_sums,
    sha256_of,
    sync_names,
    write_sums,
)
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.records.run_files import REPORT
from pcg.runtime.training.checkpoints import OPTIMIZER, STATE, TRAINER, check_checkpoint
from pcg.serve.adapters import kept_models
from pcg.serve.adapters.kept_models import MODEL
from pcg.serve.files.files import Files
from pcg.serve.http.errors import ApiError
from pcg.serve.jobs import records
from pcg.serve.jobs.records import OVER, UNFINISHED, JobRecord
from pcg.serve.store.contents import Contents, remove_path
from pcg.serve.store.database import as_store_error
from pcg.serve.store.store import Store
from pcg.serve.store.tables import (
    data_name,
    held_folders,
    hold_folder,
    jobs_with_data,
    now,
    release_data,
    resize_folder,
)
from pcg.source import TEMPLATE

_JOBS = "jobs"
_DAY_S = 86_400
_STEP = re.compile(r"step-(\d{8,})(\.\d+)?")


class JobFolder:
    """The folder of a job.

    Attributes:
        root: the folder of the store.
    """

    def __init__(self, root: Path, id: str) -> None:
        self.root = root
        self.id = id
        self.path = root / _JOBS / id
        self.training, self.validation = (self.path / data_name(index) for index in (0, 1))
        self.start = self.path / "start"
        self.checkpoints = self.path / "checkpoints"
        self.record = self.path / "record"
        self.model = self.path / MODEL

    def data(self) -> list[Path]:
        """Return the present files of the data."""
        return [*self.path.glob("*.jsonl")]

    def make(self, contents: Contents, digests: Sequence[str], start: Path | None) -> None:
        """Create the folder with links to the data and to the initial adapter.

        Args:
            digests: digests of the training data, and of the validation data.
            start: folder of the initial adapter; None for the base.
        Raises:
            ApiError: a file was deleted.
            StoreDamagedError: a file is damaged or missing.
            StoreFullError: there is no room.
        """
        try:
            self.path.mkdir(parents=True)
            for index, digest in enumerate(digests):
                os.link(contents.check(digest), self.path / data_name(index))
            if start is not None:
                self.start.mkdir()
                for name in (CONFIG, WEIGHTS, TEMPLATE):
                    if name != TEMPLATE or is_file(start / name):
                        os.link(start / name, self.start / name)
                sums = read_sums(start, FinetuneError) or {}
                if sums:
                    write_sums(
                        self.start, {name: sums[name] for name in sums if name in (CONFIG, WEIGHTS)}
                    )
                sync_names(self.start)
        except FileNotFoundError as error:
            raise ApiError(404, "A file of the job was deleted.", param="id") from error
        except OSError as error:
            raise as_store_error(error) from error
        sync_names(self.path)
        sync_names(self.path.parent)
        sync_names(self.root)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def tidy(self) -> None:
        """Remove the data and the optimizer states of a finished job."""
        for path in self.data():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.start, ignore_errors=True)
        for path in self.saved().values():
            drop_files(path, (OPTIMIZER,))
            shutil.rmtree(path / TRAINER, ignore_errors=True)

    def unnamed(self, named: Collection[str]) -> list[Path]:
        """Return the adapters, checkpoints and other files that no row names."""
        saved = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return [p for p in (*saved, self.model) if p.exists() and self.relative(p) not in named]

    def held_bytes(self) -> int:
        """Count the bytes of the files except the data and the record's page.

        The page is written after the job's end, when the bytes have been counted.
        """
        others = (*self.data(), self.record / REPORT)
        size = 0
        for path in (Path(top, name) for top, _, names in os.walk(self.path) for name in names):
            with suppress(FileNotFoundError):  # the engine renames files while a job runs
                size += 0 if path in others else path.lstat().st_size
        return size

    def strip(self) -> None:
        """Remove all but models and checkpoints, after the job's row was deleted."""
        self.tidy()
        for path in (self.record, self.start):
            shutil.rmtree(path, ignore_errors=True)

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def saved(self) -> dict[int, Path]:
        if not self.checkpoints.is_dir():
            return {}
        saved = {}
        for path in sorted(self.checkpoints.iterdir()):
            step = step_of(path.name)
            if step is not None and is_file(path / STATE):
                saved[step] = path
        return saved

    def state(self) -> dict[str, Any]:
        """Return the state of the last undamaged checkpoint, or an empty dict.

        FinetuneError: the states of all checkpoints are damaged.
        """
        damage: FinetuneError | None = None
        for _, path in sorted(self.saved().items(), reverse=True):
            try:
                check_sums(path, (STATE,), FinetuneError)
                state: dict[str, Any] = read_json(path / STATE, FinetuneError)["state"]
                return state
            except FinetuneError as error:
                damage = error
        if damage is not None:
            raise damage
        return {}

    def last_good(self) -> tuple[int, str]:
        """Return the step of the last undamaged checkpoint, and the damage of a later checkpoint.

        The step is 0 without a checkpoint; the damage is empty if there is none.
        """
        damage = ""
        for step, path in sorted(self.saved().items(), reverse=True):
            try:
                check_checkpoint(path)
                return step, damage
            except FinetuneError as error:
                damage = damage or self.without_paths(str(error))
        return 0, damage

    def check_data(self, digests: Collection[str]) -> None:
        """Compare the data with its digests.

        StoreDamagedError: the data was changed.
        """
        for path in {self.training, *self.data()}:
            if not is_file(path) or sha256_of(path) not in digests:
                raise StoreDamagedError(
                    f"{path.name} of the job is damaged: it differs from the uploaded file; upload "
                    "it again, and create another job"
                )

    def without_paths(self, text: str) -> str:
        for path in (self.path, self.root):
            text = text.replace(f"{path}/", "").replace(str(path), "the job's folder")
        return text


def step_of(name: str) -> int | None:
    """Return the step in the folder name of a checkpoint, or None."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def folder_of(store: Store, id: str) -> JobFolder:
    """Return the folder of a job."""
    return JobFolder(store.folder, id)


def folders_of(store: Store) -> list[Path]:
    """Return the existing folders of jobs."""
    root = store.folder / _JOBS
    return list(root.iterdir()) if root.is_dir() else []


def in_status(id: str, status: str, wanted: Sequence[str]) -> ApiError:
    """Return the error of an operation that a job's status does not allow."""
    return ApiError(
        400,
        f"Job {id} is {status}; the operation needs a job that is {' or '.join(wanted)}.",
        code="invalid_job_status",
    )


def remove_job(connection: sqlite3.Connection, job: JobRecord) -> None:
    """Remove a finished job, with its events and checkpoints; its models stay.

    ApiError: it is not finished.
    """
    row = records.find(connection, job.id)
    if row is not None and row.status not in OVER:
        raise in_status(job.id, row.status, OVER)
    connection.execute("DELETE FROM jobs WHERE id = ?", (job.id,))


def remove_old(connection: sqlite3.Connection, now_s: int, days: float) -> None:
    """Remove the jobs and uploads that ended more than some days ago."""
    before_s = now_s - int(days * _DAY_S)
    connection.execute(
        f"DELETE FROM jobs WHERE {records.among(OVER)} AND finished_s < ?", (*OVER, before_s)
    )
    connection.execute(
        "DELETE FROM uploads WHERE status != 'pending' AND expires_s < ?", (before_s,)
    )


async def clean_folders(files: Files, folders: Sequence[Path], days: float) -> None:
    """Remove rows that ended more than some days ago, and the parts of folders that no row needs.

    Args:
        folders: folders of jobs.
    """

    def act(connection: sqlite3.Connection) -> _Rows:
        remove_old(connection, now(), days)
        going_on = {job.id for job in records.of_status(connection, UNFINISHED)}
        return _Rows(
            going_on,
            {id for (id,) in connection.execute("SELECT id FROM jobs")} - going_on,
            jobs_with_data(connection) - going_on,
            held_folders(connection),
            kept_models.folders(connection),
        )

    rows = await files.write(act, may_use_reserve=True)
    left = await asyncio.to_thread(_sweep, files.store, folders, rows)

    def note(connection: sqlite3.Connection) -> None:
        for job, size in left.items():
            release_data(connection, job)
            resize_folder(connection, job, size)

    await files.write(note, may_use_reserve=True)


async def tidy_job(files: Files, job: JobRecord, folder: JobFolder) -> None:
    """Remove the unneeded files of a finished job, and record the size of the rest.

    If the job's row was deleted, only models and checkpoints remain. A crash may repeat the call.
    """
    row = await files.read(lambda db: records.find(db, job.id))
    if row is not None and row.status in UNFINISHED:
        return
    named = await files.read(kept_models.folders)

    def remove() -> int:
        if row is None:
            folder.strip()
        else:
            folder.tidy()
        for path in folder.unnamed(named):
            remove_path(path)
        return folder.held_bytes()

    size = await asyncio.to_thread(remove)

    def note(connection: sqlite3.Connection) -> None:
        release_data(connection, job.id)
        hold_folder(connection, job.id, job.tenant, size)

    await files.write(note, may_use_reserve=True)


@dataclass(frozen=True)
class _Rows:
    """The rows that need parts of folders.

    Attributes:
        going_on: unfinished jobs.
        over: finished jobs.
        untidy: finished jobs that still have data.
        holding: jobs, with or without rows, that have models or checkpoints in their folders.
        named: the folders of models, relative to the store's folder.
    """

    going_on: Collection[str]
    over: Collection[str]
    untidy: Collection[str]
    holding: Collection[str]
    named: Collection[str]


def _sweep(store: Store, folders: Iterable[Path], rows: _Rows) -> dict[str, int]:
    """Remove parts of folders that no row needs after a crash, or move them to quarantine.

    Returns:
        The remaining bytes of the folders of finished jobs.
    """
    left, unnamed = list[JobFolder](), list[Path]()
    for path in folders:
        folder = folder_of(store, path.name)
        if path.name in rows.going_on:
            continue
        if path.name not in rows.over and path.name not in rows.holding:
            unnamed.append(path)
            continue
        left.append(folder)
        is_gone = path.name not in rows.over  # its row was deleted
        is_unfinished = is_gone or path.name in rows.untidy
        if is_gone:
            folder.strip()
        elif is_unfinished:
            folder.tidy()
        for child in folder.unnamed(rows.named):
            if is_unfinished:
                remove_path(child)
            else:
                unnamed.append(child)
    store.discard(unnamed)
    return {folder.id: folder.held_bytes() for folder in left}

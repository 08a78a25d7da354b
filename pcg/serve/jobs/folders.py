"""Folders of jobs in the server's store.

jobs/<id>/training.jsonl        the very content of the file, whatever becomes of that
jobs/<id>/validation.jsonl
jobs/<id>/start/                the adapter that it goes on from, if it does from one
jobs/<id>/checkpoints/          of which the last ones stay, each served under a name
jobs/<id>/record/               its record, while its row is kept
jobs/<id>/model/                the adapter that it ended with
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable
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
from pcg.serve.adapters.kept_models import MODEL
from pcg.serve.http.errors import ApiError
from pcg.serve.store.contents import Contents, remove_path
from pcg.serve.store.database import as_store_error
from pcg.serve.store.store import Store

_JOBS = "jobs"
_STEP = re.compile(r"step-(\d{8,})(\.\d+)?")


@dataclass(frozen=True)
class JobFolder:
    """The folder of a job.

    Attributes:
        root: the folder of the store.
    """

    root: Path
    id: str

    @property
    def path(self) -> Path:
        return self.root / _JOBS / self.id

    @property
    def training(self) -> Path:
        return self.path / "training.jsonl"

    @property
    def validation(self) -> Path:
        return self.path / "validation.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """The adapter that the job goes on from, if it does from one."""
        return self.path / "start"

    @property
    def record(self) -> Path:
        return self.path / "record"

    @property
    def model(self) -> Path:
        return self.path / MODEL

    def make(
        self, contents: Contents, training: str, validation: str | None, start: Path | None
    ) -> None:
        """Make it with the data of the job, of which the digests are given.

        Args:
            start: the folder of the adapter that the job goes on from; what becomes of that
                changes nothing.
        Raises:
            ApiError: the adapter was deleted meanwhile.
            StoreDamagedError: a file is not what was kept, or is gone.
            StoreFullError: there is no room.
        """
        try:
            self.path.mkdir(parents=True)
            os.link(contents.check(training), self.training)
            if validation is not None:
                os.link(contents.check(validation), self.validation)
            if start is not None:
                self.start.mkdir()
                for name in (CONFIG, WEIGHTS):
                    os.link(start / name, self.start / name)
                sums = read_sums(start, FinetuneError) or {}
                if sums:
                    write_sums(
                        self.start, {one: sums[one] for one in sums if one in (CONFIG, WEIGHTS)}
                    )
                sync_names(self.start)
        except FileNotFoundError as error:
            raise ApiError(404, "A file of the job was deleted meanwhile.", param="id") from error
        except OSError as error:
            raise as_store_error(error) from error
        sync_names(self.path)
        sync_names(self.path.parent)
        sync_names(self.root)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def tidy(self) -> None:
        """Remove the data, and the states of optimizers; the job is over."""
        for path in (self.training, self.validation):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.start, ignore_errors=True)
        for path in self.saved().values():
            drop_files(path, (OPTIMIZER,))
            shutil.rmtree(path / TRAINER, ignore_errors=True)

    def unnamed(self, named: Collection[str]) -> list[Path]:
        """Return the adapters and checkpoints that are not named, and what else is with them."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return [p for p in (*found, self.model) if p.exists() and self.relative(p) not in named]

    def held_bytes(self) -> int:
        """Count the bytes of all that is in it but the data, and the record's page.

        The page is made of the rest of the record, behind the job's end, when this was counted.
        """
        others = (self.training, self.validation, self.record / REPORT)
        files = [one for one in self.path.glob("**/*") if one.is_file() and one not in others]
        return sum(one.lstat().st_size for one in files)

    def strip(self) -> None:
        """Remove all but models and checkpoints; no row is of the job any more."""
        self.tidy()
        for path in (self.record, self.start):
            shutil.rmtree(path, ignore_errors=True)

    def relative(self, path: Path) -> str:
        """Return a path in it as rows have it."""
        return str(path.relative_to(self.root))

    def saved(self) -> dict[int, Path]:
        """Return the checkpoints that are there, by step."""
        if not self.checkpoints.is_dir():
            return {}
        found = {}
        for path in sorted(self.checkpoints.iterdir()):
            step = step_of(path.name)
            if step is not None and is_file(path / STATE):
                found[step] = path
        return found

    def state(self) -> dict[str, Any]:
        """Return the state of the last checkpoint: losses, evaluations; empty without one.

        FinetuneError: the states of all checkpoints are damaged.
        """
        damage: FinetuneError | None = None
        for _, path in sorted(self.saved().items(), reverse=True):
            try:
                check_sums(path, (STATE,), FinetuneError)
                found: dict[str, Any] = read_json(path / STATE, FinetuneError)["state"]
                return found
            except FinetuneError as error:
                damage = error
        if damage is not None:
            raise damage
        return {}

    def last_good(self) -> tuple[int, str]:
        """Return the step of the last checkpoint that is whole, and the damage of a later one.

        The step is 0 without a checkpoint, the damage empty where there is none.
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
        """Compare the data with the digests of the files that it was made of.

        StoreDamagedError: it is not what was kept.
        """
        for path in (self.training, self.validation):
            try:
                is_whole = sha256_of(path) in digests
            except FileNotFoundError:
                is_whole = path == self.validation
            if not is_whole:
                raise StoreDamagedError(
                    f"{path.name} of the job is damaged: it is not the file that the job was made "
                    "with; upload it again, and make another job"
                )

    def without_paths(self, text: str) -> str:
        """Return a message without the names of the server's folders."""
        for path in (self.path, self.root):
            text = text.replace(f"{path}/", "").replace(str(path), "the job's folder")
        return text


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint by the name of its folder; None for another folder."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


def folder_of(store: Store, id: str) -> JobFolder:
    """Return the folder of a job."""
    return JobFolder(store.folder, id)


def folders_of(store: Store) -> list[Path]:
    """Return the folders of jobs that are there."""
    root = store.folder / _JOBS
    return list(root.iterdir()) if root.is_dir() else []


@dataclass(frozen=True)
class Rows:
    """The rows that need something of folders.

    Attributes:
        going_on: jobs that are not over.
        over: jobs that are, and whose rows are there.
        untidy: those of them whose data is there yet.
        holding: jobs, with rows or without, whose folders have models or checkpoints.
        named: the folders of models, relative to the store's.
    """

    going_on: Collection[str]
    over: Collection[str]
    untidy: Collection[str]
    holding: Collection[str]
    named: Collection[str]


def sweep(store: Store, folders: Iterable[Path], rows: Rows) -> dict[str, int]:
    """Remove what no row needs of folders, which a crash left, or move it to quarantine.

    Returns:
        The bytes that are left in the folders of jobs that are over.
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
        for one in folder.unnamed(rows.named):
            if is_unfinished:
                remove_path(one)
            else:
                unnamed.append(one)
    store.discard(unnamed)
    return {folder.id: folder.held_bytes() for folder in left}

"""A start removes what a kill left of jobs that are over, and nothing else."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcg.serve.adapters import kept_models
from pcg.serve.adapters.kept_models import KeptModel
from pcg.serve.engine.options import ServeOptions
from pcg.serve.files.files import Files, Quota
from pcg.serve.jobs import records
from pcg.serve.jobs.folders import OPTIMIZER, STATE, JobFolder, folder_of, folders_of
from pcg.serve.jobs.records import RUNNING, SUCCEEDED, JobRecord
from pcg.serve.jobs.runner import clean_folders, tidy_job
from pcg.serve.store.store import Store, open_store
from pcg.serve.store.tables import hold_data, hold_folder, jobs_with_data, now

ALL = {
    "training.jsonl", "checkpoints/latest", "checkpoints/step-00000002/trainer_state.json",
    "checkpoints/step-00000002/optimizer.safetensors",
    "checkpoints/step-00000002/adapter_model.safetensors",
    "checkpoints/step-00000001/trainer_state.json", "checkpoints/.saving-1/half",
    "model/adapter_model.safetensors", "record/metrics.jsonl",
}  # fmt: skip
"""The files of a job; its model and its second checkpoint have names."""
NAMED = {
    "checkpoints/step-00000002/trainer_state.json",
    "checkpoints/step-00000002/adapter_model.safetensors",
    "model/adapter_model.safetensors",
}


def made(store: Store, id: str, status: str | None, *, named: bool = True) -> JobFolder:
    """A job's folder and rows, as a kill left them; `status` is None for one without a row."""
    folder = folder_of(store, id)
    for name in ALL:
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{id} {name}")
    assert {"step-00000001", "step-00000002"} == {one.name for one in folder.saved().values()}
    job = JobRecord(
        id, "t", "tiny", "ft:tiny", status or SUCCEEDED, now(), now(), "file-1", None, 0, None, "{}"
    )

    def act(connection: sqlite3.Connection) -> None:
        records.JOBS.insert(connection, job)
        hold_data(connection, id, "t", [("digest", 5)])
        hold_folder(connection, id, "t", 10**6)
        for name in ("model", "checkpoints/step-00000002") if named else ():
            model = KeptModel(f"{id}:{name}", "t", f"jobs/{id}/{name}", now(), None)
            kept_models.MODELS.insert(connection, model)
        if status is None:
            connection.execute("DELETE FROM jobs WHERE id = ?", (id,))

    store.database.write(act).result()
    return folder


def files_of(folder: JobFolder) -> set[str]:
    found = folder.path.glob("**/*")
    return {str(one.relative_to(folder.path)) for one in found if one.is_file()}


def held(store: Store) -> dict[str, int]:
    def act(connection: sqlite3.Connection) -> dict[str, int]:
        return dict(connection.execute("SELECT job, size_bytes FROM job_folders").fetchall())

    return store.database.read(act).result()


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        files = Files(store, Quota(ServeOptions()))
        over = made(store, "over", SUCCEEDED)
        unnamed = made(store, "unnamed", SUCCEEDED, named=False)
        running = made(store, "running", RUNNING)
        gone = made(store, "gone", None)
        nobodys = folder_of(store, "nobodys")
        nobodys.path.mkdir()
        asyncio.run(clean_folders(files, folders_of(store), 90))
        assert files_of(over) == NAMED | {"record/metrics.jsonl"}
        assert files_of(unnamed) == {"record/metrics.jsonl"}
        assert files_of(running) == ALL
        assert files_of(gone) == NAMED
        assert not nobodys.path.exists()
        sizes = {one: folder_of(store, one).held_bytes() for one in ("over", "unnamed", "gone")}
        assert held(store) == {**sizes, "running": 10**6}
        assert store.database.read(jobs_with_data).result() == {"running"}


def test_the_end_of_a_job_leaves_what_is_named(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        files = Files(store, Quota(ServeOptions()))
        folder = made(store, "over", SUCCEEDED)
        job = store.database.read(lambda one: records.find(one, "over")).result()
        assert job is not None
        asyncio.run(tidy_job(files, job, folder))
        assert files_of(folder) == NAMED | {"record/metrics.jsonl"}
        assert held(store) == {"over": folder.held_bytes()}
        assert not (folder.path / OPTIMIZER).exists()
        assert (folder.checkpoints / "step-00000002" / STATE).exists()


def test_a_file_that_is_renamed_meanwhile_does_not_stop_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(tmp_path, "ftjob-1")
    folder.record.mkdir(parents=True)
    (folder.record / "metrics.jsonl").write_bytes(b"x" * 10)
    walk = os.walk

    def with_a_lost_file(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for path, folders, names in walk(top):
            yield path, folders, [*names, ".run.json.1"]

    monkeypatch.setattr(os, "walk", with_a_lost_file)
    assert folder.held_bytes() == 10

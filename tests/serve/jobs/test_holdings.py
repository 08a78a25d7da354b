"""What jobs hold: it counts in quotas, rows go, another base is refused, permissions are kept."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pcg.errors import ServeError
from pcg.serve.files.files import Files, used
from pcg.serve.jobs import runner
from pcg.serve.jobs.records import check_base
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.store.contents import Incoming
from pcg.serve.store.tables import held_bytes, now
from tests.support import serving
from tests.support.job_client import ROWS, begin, client_of, ended, lines_of, text, upload
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Served]:
    folder = tmp_path_factory.mktemp("served")
    keys = [
        {
            "name": name,
            "sha256": hashlib.sha256(f"key-of-{name}".encode()).hexdigest(),
            "scopes": ["infer", "train", "admin"],
        }
        for name in ("other", "third")
    ]
    (folder / "keys.json").write_text(json.dumps(keys))
    own: Any = {"data_dir": folder / "data", "api_keys": folder / "keys.json", "kv_cache_gib": 0.1}
    with serving.on_a_port(
        lambda: serving.make_executor(adapters=0), tenant_files_gib=2**-10, **own
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: serving.Served) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def done(client: openai.OpenAI) -> Any:
    """A job that has succeeded, whose files were deleted while it ran."""
    file = upload(client)
    made = begin(client, epochs=1, training_file=file)
    client.files.delete(file)
    over = ended(client, made.id)
    assert over.status == "succeeded", over.error
    return over


def held(server: serving.Served, tenant: str = "default") -> int:
    read = server.service.part(Files).store.database.read
    return read(lambda one: held_bytes(one, tenant, now())).result()


def test_data_of_jobs_counts_once_its_file_is_gone(
    server: serving.Served, client: openai.OpenAI
) -> None:
    file = upload(client)
    jobs = [begin(client, epochs=400, training_file=file) for _ in range(2)]
    for job in jobs:
        client.fine_tuning.jobs.pause(job.id)
    before = held(server)
    client.files.delete(file)
    assert held(server) - before == len(lines_of(ROWS))  # the two have one file on the disk
    for job in jobs:
        client.fine_tuning.jobs.cancel(job.id)
    count = "SELECT COUNT(*) FROM job_data"
    read = server.service.part(Files).store.database.read
    until(lambda: read(lambda one: one.execute(count).fetchone()[0]).result() == 0)


def test_configurations_count_until_their_jobs_are_deleted(
    server: serving.Served, client: openai.OpenAI
) -> None:
    """Whoever makes and cancels jobs with long graders fills the disk no further than others."""
    before = held(server)
    text = "a" * 2**15
    grader = {"type": "string_check", "name": "g", "input": text, "reference": text}
    reinforcement = {"grader": {**grader, "operation": "eq"}}
    job = client.fine_tuning.jobs.create(
        model=serving.MODEL,
        training_file=upload(client, [{"prompt": "a"}]),
        method={"type": "reinforcement", "reinforcement": reinforcement},  # type: ignore[typeddict-item]
    )
    client.fine_tuning.jobs.cancel(job.id)
    assert held(server) - before > 2**16
    until(lambda: not server.service.part(JobRunner)._running)
    client.delete(f"/fine_tuning/jobs/{job.id}", cast_to=object)
    until(lambda: held(server) <= before)


def test_adapters_count_until_they_are_deleted(
    server: serving.Served, client: openai.OpenAI, done: Any
) -> None:
    folder = server.service.part(Files).store.folder / "jobs" / done.id
    until(lambda: not list(folder.glob("**/optimizer.safetensors")))
    kept = [one for name in ("checkpoints", "model") for one in folder.glob(f"{name}/**/*")]
    size = sum(one.stat().st_size for one in kept if one.is_file())
    until(lambda: held(server) >= size)
    (saved,) = client.fine_tuning.jobs.checkpoints.list(done.id).data
    before = held(server)
    client.models.delete(saved.fine_tuned_model_checkpoint)
    assert held(server) < before
    assert not list((folder / "checkpoints").glob("step-*"))


def test_who_keeps_too_much_makes_no_job(server: serving.Served) -> None:
    with client_of(server.url, "key-of-other") as other:
        size = 2**20 - len(lines_of(ROWS)) - 2000
        file = upload(other)
        job = begin(other, epochs=1, training_file=file)
        other.files.create(file=("big", b"x" * size), purpose="user_data")
        over = ended(other, job.id)
        assert over.status == "failed"
        assert over.error.code == "insufficient_quota"
        with pytest.raises(openai.RateLimitError, match="and jobs' results"):
            begin(other, epochs=1, training_file=file)


def test_an_upload_is_completed_once_at_a_time(
    server: serving.Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = lines_of(ROWS)
    made = client.uploads.create(
        bytes=len(content), filename="a", mime_type="text/plain", purpose="fine-tune"
    )
    part = client.uploads.parts.create(made.id, data=content)
    joins, goes_on = threading.Event(), threading.Event()
    finish = Incoming.finish

    def slow(incoming: Incoming) -> None:
        joins.set()
        assert goes_on.wait(60)
        finish(incoming)

    with monkeypatch.context() as patch:
        patch.setattr(Incoming, "finish", slow)
        complete = client.uploads.complete
        first = threading.Thread(target=lambda: complete(made.id, part_ids=[part.id]))
        first.start()
        assert joins.wait(60)
        with pytest.raises(openai.ConflictError, match="is being completed"):
            client.uploads.complete(made.id, part_ids=[part.id])
        goes_on.set()
        first.join()
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.uploads.complete(made.id, part_ids=[part.id])


def test_permissions(server: serving.Served, client: openai.OpenAI, done: Any) -> None:
    name = done.fine_tuned_model
    permissions = client.fine_tuning.checkpoints.permissions
    with client_of(server.url, "key-of-other") as other:
        with pytest.raises(openai.NotFoundError):
            text(other, name)
        with pytest.raises(openai.NotFoundError):
            other.fine_tuning.checkpoints.permissions.create(name, project_ids=["other"])
        made = permissions.create(name, project_ids=["other", "third", "other"])
        assert [one.project_id for one in made] == ["other", "third"]
        assert [one.id for one in permissions.create(name, project_ids=["other"])] == [
            made.data[0].id
        ]
        assert text(other, name) == text(client, name)
        assert name in [one.id for one in other.models.list()]
        with pytest.raises(openai.NotFoundError):
            other.models.delete(name)
        with pytest.raises(openai.NotFoundError):
            other.fine_tuning.checkpoints.permissions.list(name)
        listed = permissions.list(name, limit=1)
        assert len(listed.data) == 1
        assert {one.project_id for one in listed} == {"other", "third"}
        assert [one.id for one in permissions.list(name, project_id="third")] == [made.data[1].id]
        gone = permissions.delete(made.data[0].id, fine_tuned_model_checkpoint=name)
        assert gone.deleted
        with pytest.raises(openai.NotFoundError):
            text(other, name)
        with pytest.raises(openai.NotFoundError):
            permissions.delete(made.data[0].id, fine_tuned_model_checkpoint=name)
    # They are found again by the next start.
    read = server.service.part(Files).store.database.read
    rows = read(lambda one: one.execute("SELECT project FROM checkpoint_permissions").fetchall())
    assert [tuple(row) for row in rows.result()] == [("third",)]


def test_another_base_is_refused(server: serving.Served, done: Any) -> None:
    store, facts = server.service.part(Files).store, server.service.client.facts
    check_base(store, facts)
    other = type(facts)(**{**vars(facts), "base_digest": "x", "name": "another"})
    with pytest.raises(ServeError, match=r"trained on other weights, of .*another --data-dir"):
        check_base(store, other)


def test_jobs_that_are_over_can_be_removed(client: openai.OpenAI, done: Any) -> None:
    long = begin(client, epochs=400)
    path = f"/fine_tuning/jobs/{long.id}"
    with pytest.raises(openai.BadRequestError, match="the operation needs a job that is succeeded"):
        client.delete(path, cast_to=object)
    client.fine_tuning.jobs.cancel(long.id)
    assert client.delete(path, cast_to=dict[str, Any])["deleted"] is True
    for ask in (client.fine_tuning.jobs.retrieve, client.fine_tuning.jobs.list_events):
        with pytest.raises(openai.NotFoundError):
            ask(long.id)
    client.delete(f"/fine_tuning/jobs/{done.id}", cast_to=object)
    assert text(client, done.fine_tuned_model)  # models stay until they are deleted
    client.models.delete(done.fine_tuned_model)


def test_rows_that_are_over_go_after_their_time(server: serving.Served) -> None:
    database = server.service.part(Files).store.database

    def counts(connection: sqlite3.Connection, days: float) -> tuple[int, int]:
        runner.remove_old(connection, now() + 7200, days)
        tables = ("jobs", "uploads")
        found = [connection.execute(f"SELECT COUNT(*) FROM {one}").fetchone()[0] for one in tables]
        return found[0], found[1]

    jobs, uploads = database.write(lambda one: counts(one, 90)).result()
    assert jobs > 0
    assert uploads > 0
    assert database.write(lambda one: counts(one, 0.001)).result() == (0, 0)
    left = database.read(lambda one: used(one, "default", now())).result()
    assert left[1] < 2**20


def test_models_are_kept_over_the_end_of_their_jobs(tmp_path: Path) -> None:
    """A start keeps the folder of a job whose rows are gone, while it holds a model."""
    own: Any = {"data_dir": tmp_path / "data", "kv_cache_gib": 0.1}

    def started() -> Any:
        return serving.on_a_port(lambda: serving.make_executor(adapters=0), **own)

    with started() as server, client_of(server.url) as client:
        job = ended(client, begin(client, epochs=1).id)
        expected = text(client, job.fine_tuned_model)
        client.delete(f"/fine_tuning/jobs/{job.id}", cast_to=object)
        folder = tmp_path / "data" / "jobs" / job.id
        until(lambda: sorted(one.name for one in folder.iterdir()) == ["checkpoints", "model"])
        (folder / "record").mkdir()
    with started() as server, client_of(server.url) as client:
        assert text(client, job.fine_tuned_model) == expected
        until(lambda: not (folder / "record").exists())

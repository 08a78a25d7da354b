"""What jobs hold: it counts in quotas, outlasts kills and damage, and goes when it is over."""

import json
import sqlite3
import threading
from typing import Any

import openai
import pytest

from pcg.errors import ServeError
from pcg.files import SUMS
from pcg.serve.files.files import Files, used
from pcg.serve.jobs import runner
from pcg.serve.jobs.folders import JobFolder
from pcg.serve.jobs.records import check_base
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.store.contents import Incoming
from pcg.serve.store.store import DATABASE
from pcg.serve.store.tables import held_bytes, now
from tests.support import serving
from tests.support.job_client import ROWS, begin, client_of, ended, lines_of, steps, text, upload
from tests.support.server_process import running
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    every = {"scopes": ["infer", "train", "admin"]}
    keys = serving.keys_file(folder, other=every, third=every)
    own = {"data_dir": folder / "data", "api_keys": keys, "kv_cache_gib": 0.1}
    with serving.on_a_port(
        lambda: serving.make_executor(adapters=0), tenant_files_gib=2**-10, **own
    ) as server:
        yield server


@pytest.fixture(scope="module")
def done(client):
    """A job that has succeeded, whose files were deleted while it ran."""
    file = upload(client)
    made = begin(client, epochs=1, training_file=file)
    client.files.delete(file)
    over = ended(client, made.id)
    assert over.status == "succeeded", over.error
    return over


def held(server, tenant="default"):
    read = server.service.part(Files).store.database.read
    return read(lambda one: held_bytes(one, tenant, now())).result()


def test_data_of_jobs_counts_once_its_file_is_gone(server, client):
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


def test_configurations_count_until_their_jobs_are_deleted(server, client):
    """Whoever makes and cancels jobs with long graders fills the disk no further than others."""
    before = held(server)
    text = "a" * 2**15
    grader = {"type": "string_check", "name": "g", "input": text, "reference": text}
    reinforcement = {"grader": {**grader, "operation": "eq"}}
    job = client.fine_tuning.jobs.create(
        model=serving.MODEL,
        training_file=upload(client, [{"prompt": "a"}]),
        method={"type": "reinforcement", "reinforcement": reinforcement},
    )
    client.fine_tuning.jobs.cancel(job.id)
    assert held(server) - before > 2**16
    until(lambda: not server.service.part(JobRunner)._running)
    client.delete(f"/fine_tuning/jobs/{job.id}", cast_to=object)
    until(lambda: held(server) <= before)


def test_adapters_count_until_they_are_deleted(server, client, done):
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


def test_who_keeps_too_much_makes_no_job(server):
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


def test_an_upload_is_completed_once_at_a_time(server, client, monkeypatch):
    content = lines_of(ROWS)
    made = client.uploads.create(
        bytes=len(content), filename="a", mime_type="text/plain", purpose="fine-tune"
    )
    part = client.uploads.parts.create(made.id, data=content)
    joins, goes_on = threading.Event(), threading.Event()
    finish = Incoming.finish

    def slow(incoming):
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


def test_permissions(server, client, done):
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


def test_another_base_is_refused(server, done):
    store, facts = server.service.part(Files).store, server.service.client.facts
    check_base(store, facts)
    other = type(facts)(**{**vars(facts), "base_digest": "x", "name": "another"})
    with pytest.raises(ServeError, match=r"trained on other weights, of .*another --data-dir"):
        check_base(store, other)


def test_jobs_that_are_over_can_be_removed(client, done):
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


def test_rows_that_are_over_go_after_their_time(server):
    database = server.service.part(Files).store.database

    def counts(connection, days):
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


def test_models_are_kept_over_the_end_of_their_jobs(tmp_path):
    """A start keeps the folder of a job whose rows are gone, while it holds a model."""
    own = {"data_dir": tmp_path / "data", "kv_cache_gib": 0.1}

    def started():
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


def kill(server):
    server.process.kill()
    server.process.wait(60)


def losses(client, job):
    found = client.fine_tuning.jobs.list_events(job)
    return {one.data["step"]: one.data["train_loss"] for one in found if one.type == "metrics"}


@pytest.mark.slow
def test_a_start_adds_what_a_crash_left_out(tmp_path, monkeypatch):
    """The engine had done the last steps, and written their checkpoint, and no row told of them."""
    own = {"data_dir": tmp_path, "kv_cache_gib": 0.1}
    monkeypatch.setattr(JobFolder, "tidy", lambda _: None)  # the crash was before that
    with serving.on_a_port(**own) as server, client_of(server.url) as client:
        made = ended(client, begin(client).id)
        before, said = losses(client, made.id), text(client, made.fine_tuned_model)
    connection = sqlite3.connect(tmp_path / DATABASE)
    with connection:
        connection.execute("UPDATE jobs SET status = 'running', result_file = NULL")
        connection.execute("DELETE FROM job_events WHERE step > 4")
        connection.execute("DELETE FROM job_checkpoints WHERE step > 4")
        connection.execute("DELETE FROM models WHERE name NOT LIKE '%-3'")
    connection.close()
    (tmp_path / SUMS).unlink()  # as of a server that was killed
    (tmp_path / "jobs" / "ftjob-unknown").mkdir()
    with serving.on_a_port(**own) as server, client_of(server.url) as client:
        again = ended(client, made.id)
        assert again.status == "succeeded"
        assert losses(client, made.id) == pytest.approx(before)
        assert sorted(steps(client, made.id)) == [1, 2, 3, 4, 5, 6]
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(made.id))
        assert [one.step_number for one in checkpoints] == [6, 3]
        names = [one.fine_tuned_model_checkpoint for one in checkpoints]
        assert text(client, names[0]) == text(client, made.fine_tuned_model) == said
        assert not (tmp_path / "jobs" / "ftjob-unknown").exists()
        client.models.delete(made.fine_tuned_model)
        with pytest.raises(openai.NotFoundError):
            text(client, made.fine_tuned_model)
    with serving.on_a_port(**own) as server, client_of(server.url) as client:
        there = {model.id for model in client.models.list()}
        assert made.fine_tuned_model not in there
        assert set(names) <= there
        client.models.delete(names[1])  # one that is not loaded
        assert names[1] not in {model.id for model in client.models.list()}


@pytest.mark.slow
def test_a_job_whose_folder_is_damaged_holds_up_no_other(tmp_path):
    own = {"data_dir": tmp_path, "kv_cache_gib": 0.1}
    with serving.on_a_port(**own) as server, client_of(server.url) as client:
        damaged, whole = (begin(client, epochs=400).id for _ in range(2))
        for job in (damaged, whole):
            client.fine_tuning.jobs.pause(job)
    connection = sqlite3.connect(tmp_path / DATABASE)
    with connection:
        connection.execute("UPDATE jobs SET status = 'queued' WHERE id = ?", (whole,))
    connection.close()
    (tmp_path / SUMS).unlink()  # as of a server that was killed
    state = tmp_path / "jobs" / damaged / "checkpoints" / "step-99999999" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{")
    with serving.on_a_port(**own) as server, client_of(server.url) as client:
        jobs = client.fine_tuning.jobs
        until(lambda: jobs.retrieve(whole).status == "running")
        jobs.cancel(whole)
        assert jobs.cancel(damaged).status == "cancelled"


@pytest.mark.slow
def test_a_job_goes_on_after_a_kill(tmp_path):
    """Events of all steps are there once, and the losses are those of a job that ran through."""
    kept = ["--data-dir", str(tmp_path)]
    with running(*kept) as server, client_of(server.url) as client:
        file = upload(client)
        done = ended(client, begin(client, epochs=1, training_file=file).id)
        assert done.status == "succeeded"
        said = text(client, done.fine_tuned_model)
        fields = {"training_file": file, "seed": 3, "epochs": 12}
        job = begin(client, **fields, own={"save_every": 2}).id
        until(lambda: len(steps(client, job)) >= 5)
        before = losses(client, job)
        kill(server)
    # An event that was not written before the kill is written from the checkpoint.
    state = max((tmp_path / "jobs" / job / "checkpoints").glob("step-*/trainer_state.json"))
    saved = json.loads(state.read_text())["state"]["losses"]
    with running(*kept) as server, client_of(server.url) as client:
        assert client.files.retrieve(file).id == file
        assert text(client, done.fine_tuned_model) == said
        again = ended(client, job)
        assert again.status == "succeeded"
        assert sorted(steps(client, job)) == list(range(1, 37))
        found = losses(client, job)
        assert {step: found[step] for step in before} == before
        assert [found[step] for step in range(1, len(saved) + 1)] == pytest.approx(saved)
        whole = ended(client, begin(client, **fields).id)
        assert list(losses(client, whole.id).values()) == pytest.approx(
            list(found.values()), rel=1e-3
        )
        assert text(client, again.fine_tuned_model) == text(client, whole.fine_tuned_model)
        (result,) = again.result_files
        assert len(client.files.content(result).text.splitlines()) == 37
        assert serving.MODEL in {model.id for model in client.models.list()}

"""`pcg serve` is killed while jobs run, and started again: nothing is lost, nothing doubled."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from pcg.files import SUMS
from pcg.serve.jobs.folders import JobFolder
from pcg.serve.store.store import DATABASE
from tests.support import serving
from tests.support.job_client import begin, client_of, ended, steps, text, upload
from tests.support.server_process import Running, running
from tests.support.waiting import until


def kill(server: Running) -> None:
    server.process.kill()
    server.process.wait(60)


def losses(client: Any, job: str) -> dict[int, float]:
    found = client.fine_tuning.jobs.list_events(job)
    return {one.data["step"]: one.data["train_loss"] for one in found if one.type == "metrics"}


def test_a_start_adds_what_a_crash_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine had done the last steps, and written their checkpoint, and no row told of them."""
    own: dict[str, Any] = {"data_dir": tmp_path, "kv_cache_gib": 0.1}
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


def test_a_job_whose_folder_is_damaged_holds_up_no_other(tmp_path: Path) -> None:
    own: dict[str, Any] = {"data_dir": tmp_path, "kv_cache_gib": 0.1}
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
def test_a_job_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Events of all steps are there once, and the losses are those of a job that ran through."""
    kept = ["--data-dir", str(tmp_path)]
    with running(*kept) as server, client_of(server.url) as client:
        file = upload(client)
        done = ended(client, begin(client, epochs=1, training_file=file).id)
        assert done.status == "succeeded"
        said = text(client, done.fine_tuned_model)
        fields: dict[str, Any] = {"training_file": file, "seed": 3, "epochs": 12}
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

"""Parts of jobs: warm ones, bases, cleaning behind a kill, and rollouts."""

import asyncio
import os
from types import SimpleNamespace
from typing import cast

import pytest

from pcg.errors import FinetuneError, QueueFullError, ServeError
from pcg.records.run import read_run
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.serve.adapters import kept_models
from pcg.serve.adapters.kept_models import KeptModel
from pcg.serve.engine import reinforcement
from pcg.serve.engine.messages import JobStep
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.reinforcement import Rollouts, add_step, opened
from pcg.serve.files.files import Files, Quota
from pcg.serve.jobs import records
from pcg.serve.jobs.folders import OPTIMIZER, STATE, JobFolder, folder_of, folders_of
from pcg.serve.jobs.records import RUNNING, SUCCEEDED, JobRecord, check_base
from pcg.serve.jobs.runner import clean_folders, tidy_job
from pcg.serve.jobs.settings import DEFAULT_PEFT
from pcg.serve.store.store import open_store
from pcg.serve.store.tables import hold_data, hold_folder, jobs_with_data, now
from pcg.serve.tinker.records import (
    CHECKPOINTS,
    CLOSED,
    MODELS,
    SAMPLER,
    SAMPLERS,
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
    insert_sampler,
)
from pcg.train.grpo.loop import Sample
from tests.support import tinker_client

FIRST = SimpleNamespace(base_digest="sha256:a", name="first")
OTHER = SimpleNamespace(base_digest="sha256:b", name="other")


def keep(store, act):
    store.database.write(act).result()


def test_what_tinkers_clients_trained_is_of_one_base(tmp_path):
    model = ModelRecord("s:train:0", "a", "s", 0, "first", "{}", None, 0, 0)
    path = "tinker://s:train:0/sampler_weights/x"
    saved = CheckpointRecord(
        path, "a", model.id, SAMPLER, "x", "tinker/x", "first", "{}", None, 1, 0, None
    )
    sampler = SamplerRecord("smp-1", "a", "s", 0, "first", None, "tinker/y", 0, 1)
    with open_store(tmp_path) as store:
        check_base(store, OTHER)
        check_base(store, FIRST)  # nothing was trained on the other one
        keep(store, lambda one: MODELS.insert(one, model))
        keep(store, lambda one: CHECKPOINTS.insert(one, saved))
        keep(store, lambda one: insert_sampler(one, sampler))
        for count, removed in (
            (3, lambda one: MODELS.change(one, {"status": CLOSED}, id=model.id)),
            (2, lambda one: one.execute("UPDATE tinker_checkpoints SET expires_s = ?", (now(),))),
            (1, lambda one: SAMPLERS.delete(one, id=sampler.id)),
        ):
            for _ in range(2):  # what is refused is not noted
                with pytest.raises(ServeError, match=f"has {count} models, .* of 'first'"):
                    check_base(store, OTHER)
            check_base(store, FIRST)
            keep(store, removed)
        check_base(store, OTHER)


def test_a_server_notes_what_it_serves(tmp_path):
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        assert tinker_client.new_model(raw, tinker_client.new_session(raw)).status_code == 200
    with open_store(tmp_path) as store, pytest.raises(ServeError, match="has 1 models"):
        check_base(store, OTHER)


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


def made(store, id, status, *, named=True):
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

    def act(connection):
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


def files_of(folder):
    found = folder.path.glob("**/*")
    return {str(one.relative_to(folder.path)) for one in found if one.is_file()}


def held(store):
    def act(connection):
        return dict(connection.execute("SELECT job, size_bytes FROM job_folders").fetchall())

    return store.database.read(act).result()


def test_what_a_kill_left_is_removed(tmp_path):
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


def test_the_end_of_a_job_leaves_what_is_named(tmp_path):
    with open_store(tmp_path) as store:
        files = Files(store, Quota(ServeOptions()))
        folder = made(store, "over", SUCCEEDED)
        job = store.database.read(lambda one: records.find(one, "over")).result()
        asyncio.run(tidy_job(files, job, folder))
        assert files_of(folder) == NAMED | {"record/metrics.jsonl"}
        assert held(store) == {"over": folder.held_bytes()}
        assert not (folder.path / OPTIMIZER).exists()
        assert (folder.checkpoints / "step-00000002" / STATE).exists()


def test_a_file_that_is_renamed_meanwhile_does_not_stop_the_count(tmp_path, monkeypatch):
    folder = JobFolder(tmp_path, "ftjob-1")
    folder.record.mkdir(parents=True)
    (folder.record / "metrics.jsonl").write_bytes(b"x" * 10)
    walk = os.walk

    def with_a_lost_file(top):
        for path, folders, names in walk(top):
            yield path, folders, [*names, ".run.json.1"]

    monkeypatch.setattr(os, "walk", with_a_lost_file)
    assert folder.held_bytes() == 10


class Asked:
    """A request, which ends when it is waited for."""

    def __init__(self, engine, error):
        self.is_over = error is not None
        self.was_cancelled = False
        self._engine = engine
        self._error = error

    def wait_all(self):
        if self._error is not None:
            raise self._error
        if not self.is_over:
            self._engine.running -= 1
        self.is_over = True
        return ["text"]

    def cancel(self):
        self.was_cancelled = True


class Engine:
    """An engine that refuses its first requests."""

    def __init__(self, refuses=0):
        self.refuses = refuses
        self.tenants = []
        self.asked = []
        self.running = self.most = 0

    def submit(self, prompt, *, tenant, **_):
        self.tenants.append(tenant)
        error = QueueFullError("full") if len(self.tenants) <= self.refuses else None
        self.asked.append(Asked(self, error))
        if error is None:
            self.running += 1
            self.most = max(self.most, self.running)
        return self.asked[-1]


def test_they_are_their_tenants_and_asked_again(monkeypatch):
    monkeypatch.setattr(reinforcement, "_AGAIN_S", 0.0)
    engine = Engine(refuses=2)
    one = Rollouts(cast(AsyncEngine, engine), "alice", None).submit([1], n=8)
    assert one.wait_all() == one.wait_all() == ["text"]
    assert engine.tenants == ["alice"] * 3


def test_so_many_at_once_and_none_behind_the_end():
    """A job of thousands of completions leaves room in the queue, for its tenant and for others."""
    engine = Engine()
    made = Rollouts(cast(AsyncEngine, engine), "alice", 16)
    asked = [made.submit([1], n=8) for _ in range(10)]
    assert engine.most == 2
    assert made.submit([1], n=64).wait_all() == ["text"]  # more than there is room for, by itself
    last = made.submit([1], n=8)
    made.end()
    assert engine.asked[-1].was_cancelled
    assert asked[0].wait_all() == last.wait_all() == ["text"]
    with pytest.raises(FinetuneError, match="was cancelled"):
        made.submit([1])


def step(number):
    more = {"reward": 0.5, "valid_reward_mean": 0.25}
    return JobStep(number, 1000, 0.1, None, 1e-4, 1.0, number, 9.0, None, more)


def test_a_long_job_keeps_few_samples(tmp_path):
    """A page reads all of them, and their texts are the tenant's."""
    some = [Sample(1, [{"role": "user", "content": "a" * 10**5}], "b" * 10**5, {"r": 1.0}, 0.0)]
    with opened(str(tmp_path), {}, "job", [step(1), step(2)]) as record:
        for number in range(3, 1001):
            add_step(record, step(number), some)
    run = read_run(tmp_path)
    assert run.last_step == 1000
    assert run.series["reward"][0] == (1, 0.5)
    assert len(run.series["eval_reward"]) == 1000
    assert len(run.samples) == 200
    assert len(run.samples[0]["prompt"]) == len(run.samples[0]["completion"]) == 2000


def test_an_engine_is_told_of_jobs():
    own = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    given = (
        '{"batch": 4, "seq": 512}',
        '{"peft": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}}',
    )
    expected = (WarmJob(DEFAULT_PEFT, 4, 512), WarmJob(own))
    assert ServeOptions(warm_jobs=given).engine(1).warm_jobs == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora", "lora is not JSON"),
        ("[1]", 'use {"batch": …, "seq": …}'),
        ('{"steps": 4}', 'use {"batch": …, "seq": …}'),
        ('{"batch": 0}', "batch=0 of a warm job; use an int of at least 1"),
        ('{"seq": true}', "seq=True of a warm job"),
        ('{"peft": {"peft_type": "XLORA"}}', "XLORA"),
    ],
)
def test_what_is_no_job_is_refused_before_a_model_is_loaded(text, message):
    with pytest.raises(ServeError, match=message):
        ServeOptions(warm_jobs=(text,)).engine(1)


def test_jobs_need_a_warm_up():
    with pytest.raises(ServeError, match="warm_jobs are recorded by warm_up"):
        ServeOptions(warm_jobs=("{}",), warm_up=False)

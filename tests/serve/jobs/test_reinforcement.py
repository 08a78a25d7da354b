"""Reinforcement fine-tuning by the real openai client: rewards by graders, told, served, kept."""

import asyncio
import json

import httpx
import openai
import pytest
from safetensors.torch import load_file

from pcg.errors import GraderError
from pcg.records.run import read_run
from pcg.serve.engine import reinforcement
from pcg.serve.files.files import Files
from pcg.serve.jobs import records
from pcg.serve.jobs.runner import JobRunner
from tests.support import serving
from tests.support.job_client import PEFT, client_of, ended, events, steps, text, upload
from tests.support.server_process import running
from tests.support.waiting import until

ROWS = [
    {"messages": [{"role": "user", "content": word}], "answer": answer, "more": {"deep": [answer]}}
    for word, answer in (("one", "a"), ("two", "e"), ("six", "e"), ("ten", "o"))
]
GRADER = {
    "type": "text_similarity",
    "name": "alike",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}} {{item.more.deep.0}}",
    "evaluation_metric": "fuzzy_match",
}
OWN = {"peft": PEFT, "learning_rate": 0.01, "max_completion_length": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    own = {"data_dir": tmp_path_factory.mktemp("served"), "kv_cache_gib": 0.1}
    with serving.on_a_port(lambda: serving.make_executor(adapters=0), **own) as server:
        yield server


def begun(
    client,
    grader=GRADER,
    rows=ROWS,
    own=None,
    validation_file=None,
    training_file=None,
    tests=None,
    **given,
):
    if tests is not None:
        validation_file = upload(client, tests)
    hyperparameters = {"n_epochs": 1, "batch_size": 2, "compute_multiplier": 0.25, **given}
    return client.fine_tuning.jobs.create(
        model=serving.MODEL,
        training_file=training_file or upload(client, rows),
        validation_file=validation_file or openai.omit,
        seed=3,
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": hyperparameters},
        },
        extra_body={"pcg": {**OWN, **(own or {})}},
    )


def idle(server, client):
    """True once the engine runs no job; the question keeps the client's connection open."""
    client.fine_tuning.jobs.list(limit=1)
    return not server.service.part(JobRunner)._running


def test_a_job_is_rewarded_told_and_served(client):
    made = begun(
        client,
        validation_file=upload(client, ROWS[:1]),
        eval_interval=1,
        eval_samples=3,
        own={"save_every": 1, "temperature": 0.7, "max_tokens_per_pass": 64},
    )
    job = ended(client, made.id)
    assert job.status == "succeeded", job.error
    assert job.method.type == "reinforcement"
    assert job.method.reinforcement.grader.model_dump() == GRADER
    assert job.method.reinforcement.hyperparameters.eval_samples == 3
    assert job.hyperparameters.model_dump()["compute_multiplier"] == 0.25
    grpo = job.pcg["options"]["grpo"]
    assert (grpo["num_generations"], grpo["temperature"]) == (2, 0.7)
    assert job.trained_tokens > 0
    told = [one for one in events(client, job.id) if one.type == "metrics"]
    assert [one.data["step"] for one in told] == [1, 2]
    for one in told:
        assert 0 <= one.data["train_reward_mean"] <= 1
        assert 0 <= one.data["valid_reward_mean"] <= 1
        assert "reward=" in one.message
    found = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [one.step_number for one in found] == [2, 1]
    assert text(client, found[0].fine_tuned_model_checkpoint) == text(client, job.fine_tuned_model)
    assert client.models.retrieve(found[1].fine_tuned_model_checkpoint).parent == serving.MODEL
    (result,) = job.result_files
    table = client.files.content(result).text.splitlines()
    columns = table[0].split(",")
    assert {"train_reward_mean", "rewards/grader/mean", "valid_reward_mean"} <= set(columns)
    assert len(table) == 3
    page = client.get(f"/fine_tuning/jobs/{job.id}/report", cast_to=httpx.Response).text
    assert "reward" in page
    assert "Samples" in page


def test_a_job_goes_on_where_it_was(server, client, monkeypatch):
    """A run that was paused ends in the weights of one that was not; a checkpoint has few steps."""
    monkeypatch.setattr(reinforcement, "_KEPT_STEPS", 1)
    jobs = client.fine_tuning.jobs
    whole = ended(client, begun(client, n_epochs=4).id)
    made = begun(client, n_epochs=4)
    until(lambda: len(steps(client, made.id)) > 0)
    jobs.pause(made.id)
    until(lambda: idle(server, client))
    paused = steps(client, made.id)
    jobs.resume(made.id)
    job = ended(client, made.id)
    assert (whole.status, job.status) == ("succeeded", "succeeded"), job.error
    assert steps(client, made.id) == list(range(1, 9))
    assert len(paused) < 8
    folder = server.service.part(Files).store.folder / "jobs"
    state = json.loads(
        (folder / job.id / "checkpoints/step-00000008/trainer_state.json").read_text()
    )
    assert [told["step"] for told in state["state"]["told"]] == [8]
    assert read_run(folder / job.id / "record").last_step == 8
    one, other = (
        load_file(folder / done.id / "model" / "adapter_model.safetensors") for done in (whole, job)
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() < 1e-4, name


def test_a_cancelled_job_leaves_no_model(server, client):
    made = begun(client, n_epochs=900)
    until(lambda: len(steps(client, made.id)) > 0)
    assert client.fine_tuning.jobs.cancel(made.id).status == "cancelled"
    until(lambda: idle(server, client))
    assert client.fine_tuning.jobs.retrieve(made.id).fine_tuned_model is None
    executor = server.service.client.executor
    row = (
        server.service.part(Files)
        .store.database.read(lambda one: records.find(one, made.id))
        .result()
    )
    assert f"@default/{row.name}" not in executor.adapters


def test_a_grader_that_grades_nothing_fails_the_job(client):
    job = ended(client, begun(client, {**GRADER, "reference": "{{item.nothing}}"}).id)
    assert job.status == "failed"
    assert "no completion can be graded: the template names item.nothing" in job.error.message
    long = [{"prompt": "word " * 200, "answer": "a", "more": {"deep": ["b"]}}]
    job = ended(client, begun(client, rows=long).id)
    assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
    assert job.error.message.startswith("training.jsonl line 1: the prompt has")


def test_files_with_a_mark_of_their_encoding(client):
    """Rows are read as they were looked at: a byte-order mark, and ends of lines within one."""
    data = (
        b"\xef\xbb\xbf" + b'{"prompt":\r"a", "answer": "\xe2\x80\xa8", "more": {"deep": [1]}}\r\n'
    )
    file = client.files.create(file=("train.jsonl", data), purpose="fine-tune").id
    job = ended(client, begun(client, training_file=file).id)
    assert job.status == "succeeded", job.error


class Endless:
    """A grading that never ends by itself."""

    def __init__(self):
        self.has_begun = self.was_ended = False

    async def grade(self, *_):
        self.has_begun = True
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.was_ended = True
        return []


def test_nothing_is_graded_of_a_job_that_was_cancelled(server, client, monkeypatch):
    grading = Endless()
    monkeypatch.setattr(server.service.part(JobRunner), "_grading", grading)
    made = begun(client)
    until(lambda: grading.has_begun)
    client.fine_tuning.jobs.cancel(made.id)
    until(lambda: idle(server, client) and grading.was_ended)


class Picky:
    """A grading that cannot grade what it is asked first."""

    def __init__(self):
        self.sizes = []

    async def grade(self, _, __, ___, samples):
        self.sizes.append(len(samples.texts))
        if len(self.sizes) == 1:
            raise GraderError("no completion can be graded")
        return [1.0] * len(samples.texts)


def test_completions_are_graded_in_parts(server, client, monkeypatch):
    """A message has a bound, and a part that cannot be graded has the reward 0."""
    monkeypatch.setattr(reinforcement, "_TOGETHER", 3)
    grading = Picky()
    monkeypatch.setattr(server.service.part(JobRunner), "_grading", grading)
    job = ended(client, begun(client, batch_size=4).id)
    assert job.status == "succeeded", job.error
    assert grading.sizes == [3, 3, 2]
    (told,) = [one.data for one in events(client, job.id) if one.type == "metrics"]
    assert told["train_reward_mean"] == 5 / 8


class Refusing:
    """A grading whose errors no message can hold."""

    async def grade(self, *_):
        raise GraderError("half \ud800")


def test_an_error_of_a_grader_reaches_the_job(server, client, monkeypatch):
    monkeypatch.setattr(server.service.part(JobRunner), "_grading", Refusing())
    job = ended(client, begun(client).id)
    assert job.status == "failed"
    assert "half ?" in job.error.message


@pytest.mark.slow
def test_a_job_goes_on_after_a_kill(tmp_path):
    """Steps are told once, and the losses and rewards are those of a job that ran through."""
    own = {"save_every": 2}

    def told(client, job):
        metrics = [one.data for one in events(client, job) if one.type == "metrics"]
        return {one["step"]: (one["train_loss"], one["train_reward_mean"]) for one in metrics}

    with running("--data-dir", str(tmp_path)) as server, client_of(server.url) as client:
        job = begun(client, n_epochs=6, own=own).id
        until(lambda: len(steps(client, job)) >= 3)
        before = told(client, job)
        server.process.kill()
        server.process.wait(60)
    with running("--data-dir", str(tmp_path)) as server, client_of(server.url) as client:
        again = ended(client, job)
        assert again.status == "succeeded", again.error
        assert sorted(steps(client, job)) == list(range(1, 13))
        found = told(client, job)
        assert {step: found[step] for step in before} == before
        whole = told(client, ended(client, begun(client, n_epochs=6, own=own).id).id)
        for step, numbers in whole.items():
            assert numbers == pytest.approx(found[step], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grader": {"type": "python", "name": "p", "source": "x"}}, "--python-graders"),
        ({"grader": {**GRADER, "evaluation_metric": "cosine"}}, "needs embeddings"),
        ({"rows": [{"prompt": "a", "messages": []}]}, "line 1: give 'messages' or 'prompt'"),
        (
            {"rows": [{"messages": [{"role": "assistant", "content": "x"}]}]},
            "role 'user' or 'tool'",
        ),
        ({"rows": [{"prompt": "a", "tools": [{}]}]}, "has 'tools', which rollouts do not support"),
        ({"rows": [{"prompt": "a" * 70000}]}, "use at most 65536"),
        ({"rows": [{"prompt": "a", "n": 10**30}]}, "line 1 has an integer of more than 64 bits"),
        ({"rows": [{"prompt": "a", "\ud800": 1}]}, "line 1 has a text with an unpaired surrogate"),
        ({"grader": {**GRADER, "input": "a" * 2**16, "reference": "é" * 2**17}}, "use at most"),
        ({"compute_multiplier": 0}, "compute_multiplier"),
        ({"n_epochs": 0}, "n_epochs': Input should be greater than or equal to 1"),
        ({"tests": ROWS * 65, "eval_samples": 16}, "An evaluation would have 4160 completions"),
        ({"colour": 1}, "Unrecognized request argument"),
        ({"own": {"max_length": 8}}, "pcg.max_length: unknown option"),
        ({"own": {"num_iterations": 2}}, "a job saves its state after any update"),
        ({"own": {"eval_every": 2}}, "give eval_interval instead"),
        ({"own": {"temperature": 0.7, "beta": 0.1}}, "temperature=0.7 and beta=0.1"),
        ({"own": {"max_completion_length": 500}}, "leaves no room for a prompt"),
        ({"own": {"schedule": "cosine"}}, "the name here is 'lr_scheduler_type'"),
        ({"own": {"lr_scheduler_type": "wavy"}}, "wavy"),
        ({"learning_rate_multiplier": 2}, "not both"),
    ],
)
def test_jobs_that_cannot_be(client, change, said):
    with pytest.raises(openai.BadRequestError) as refused:
        begun(client, **change)
    assert said in refused.value.message

"""Fine-tuning jobs by the real openai client: made, run, told, served, changed and bounded."""

import dataclasses
import json

import httpx
import openai
import pytest

from pcg.serve.adapters.catalog import Catalog
from pcg.serve.files.files import Files
from pcg.serve.jobs.folders import JobFolder
from tests.support import serving
from tests.support.job_client import (
    PEFT,
    ROWS,
    begin,
    client_of,
    ended,
    events,
    lines_of,
    steps,
    text,
    upload,
)
from tests.support.waiting import until

NESTED = {"x": json.loads("[" * 99 + "]" * 99)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    reader = {"scopes": ["infer"], "tenant": "default"}
    keys = serving.keys_file(folder, other={"scopes": ["infer", "train"]}, reader=reader)
    own = {"data_dir": folder / "data", "api_keys": keys, "kv_cache_gib": 0.1}
    with serving.on_a_port(lambda: serving.make_executor(adapters=0), max_jobs=1, **own) as server:
        yield server


@pytest.fixture(scope="module")
def done(client):
    """A job that has succeeded."""
    made = begin(
        client,
        validation_file=upload(client, ROWS[:2]),
        suffix="mine",
        seed=7,
        metadata={"team": "a", "run": "1"},
    )
    assert (made.status, made.fine_tuned_model, made.trained_tokens) == ("queued", None, None)
    return ended(client, made.id)


def test_a_job_is_told_as_it_was_resolved(done):
    assert done.status == "succeeded", done.error
    assert done.hyperparameters.n_epochs == 2
    assert done.hyperparameters.batch_size == 2
    assert done.hyperparameters.learning_rate_multiplier == pytest.approx(50)
    assert done.method.supervised.hyperparameters.n_epochs == 2
    assert (done.seed, done.metadata, done.error) == (7, {"team": "a", "run": "1"}, None)
    assert done.trained_tokens > 0
    assert done.finished_at >= done.created_at
    assert done.pcg["peft"] == PEFT
    assert done.pcg["total_steps"] == 6


def test_its_events_tell_each_step_once(client, done):
    found = events(client, done.id)
    said = [one.message for one in found if one.type == "message"]
    assert said[0] == f"Created fine-tuning job: {done.id}"
    assert "Fine-tuning job started" in said
    assert said[-2:] == [
        f"New fine-tuned model created: {done.fine_tuned_model}",
        "The job has successfully completed",
    ]
    assert steps(client, done.id) == [1, 2, 3, 4, 5, 6]
    metrics = [one for one in found if one.type == "metrics"]
    assert metrics[0].message.startswith("Step 1/6: training loss=")
    assert metrics[2].data["valid_loss"] > 0
    assert metrics[-1].data["train_loss"] < metrics[0].data["train_loss"]
    pages = client.fine_tuning.jobs.list_events(done.id, limit=3)
    assert len(pages.data) == 3
    assert [one.id for one in pages] == [one.id for one in found[::-1]]


def test_the_model_and_its_checkpoints_serve(server, client, done):
    name = done.fine_tuned_model
    assert name.startswith(f"ft:{serving.MODEL}:default:mine:")
    listed = {model.id for model in client.models.list()}
    found = list(client.fine_tuning.jobs.checkpoints.list(done.id))
    assert [one.step_number for one in found] == [6, 3]
    assert {name, *(one.fine_tuned_model_checkpoint for one in found)} <= listed
    last, first = (one.fine_tuned_model_checkpoint for one in found)
    assert first == f"{name}:ckpt-step-3"
    assert found[0].metrics.valid_loss is not None
    assert text(client, last) == text(client, name)
    assert client.models.retrieve(first).parent == serving.MODEL
    # The same adapter through the library ends in the same weights.
    executor = serving.make_executor(adapters=0)
    executor.finetune(
        ROWS, "same", peft=PEFT, epochs=2, batch_size=2, learning_rate=0.01, seed=7, progress=False
    )
    trained = server.service.client.executor.adapters[f"@default/{name}"]
    for one, other in zip(trained.tensors, executor.adapters["same"].tensors, strict=True):
        assert (one - other).abs().max() < 1e-5


def test_the_result_file_is_a_table(client, done):
    (result,) = done.result_files
    assert client.files.retrieve(result).purpose == "fine-tune-results"
    table = client.files.content(result).text.splitlines()
    assert table[0] == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    rows = [line.split(",") for line in table[1:]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [bool(row[3]) for row in rows] == [False, False, True, False, False, True]


def test_a_job_that_is_over_leaves_no_data(server, done):
    folder = server.service.part(Files).store.folder / "jobs" / done.id
    until(lambda: not (folder / "training.jsonl").exists())
    until(lambda: not list(folder.glob("**/optimizer.safetensors")))
    assert sorted(one.name for one in folder.iterdir()) == ["checkpoints", "model", "record"]


def test_its_report_is_its_owners(server, client, done):
    path = f"/fine_tuning/jobs/{done.id}/report"
    answer = client.get(path, cast_to=httpx.Response)
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]
    page = answer.text
    for words in (done.fine_tuned_model, "completed", "6 of 6", "eval_loss", "learning_rate"):
        assert words in page
    folder = server.service.part(Files).store.folder
    assert str(folder) not in page
    rows = (folder / "jobs" / done.id / "record/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for key, status in (("key-of-other", 404), ("key-of-reader", 403), ("wrong", 401)):
        with pytest.raises(openai.APIStatusError) as refused:
            client.with_options(api_key=key).get(path, cast_to=httpx.Response)
        assert refused.value.status_code == status
    with pytest.raises(openai.NotFoundError):
        client.get("/fine_tuning/jobs/..%2f..%2fdata/report", cast_to=httpx.Response)


def test_what_another_tenant_made_is_not_there(server, client, done):
    with client_of(server.url, "key-of-other") as other:
        jobs = other.fine_tuning.jobs
        assert done.id not in [one.id for one in jobs.list()]
        for ask in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.list_events):
            with pytest.raises(openai.NotFoundError):
                ask(done.id)
        with pytest.raises(openai.NotFoundError):
            jobs.checkpoints.list(done.id)
        with pytest.raises(openai.NotFoundError):
            text(other, done.fine_tuned_model)
        with pytest.raises(openai.NotFoundError, match="No such File") as missing:
            begin(other, training_file=done.training_file)
        assert missing.value.param == "training_file"
    with client_of(server.url, "key-of-reader") as reader:
        assert text(reader, done.fine_tuned_model)
        with pytest.raises(openai.PermissionDeniedError):
            reader.fine_tuning.jobs.retrieve(done.id)


def test_lists_pages_and_metadata(client, done):
    jobs = client.fine_tuning.jobs
    more = [begin(client, epochs=1, metadata={"team": "b"}), begin(client, epochs=1)]
    made = [one.id for one in (done, *more)]
    assert [one.id for one in jobs.list(limit=1)][:2] == made[:0:-1]
    assert {one.id for one in jobs.list()} >= set(made)
    assert [one.id for one in jobs.list(metadata={"team": "a", "run": "1"})] == made[:1]
    assert [one.id for one in jobs.list(metadata={"team": "b"})] == made[1:2]
    without = [one.id for one in jobs.list(extra_query={"metadata": "null"})]
    assert made[2] in without
    assert made[0] not in without
    for name in ("metadata[]", f"metadata[{'k' * 65}]", "metadata[k"):
        with pytest.raises(openai.BadRequestError, match="a key of 1 to 64 characters"):
            jobs.list(extra_query={name: "v"})
    assert not list(jobs.list(metadata={"a\nb": "c"}))
    for one in more:
        jobs.cancel(one.id)


def test_cancel_pause_and_resume(client):
    jobs = client.fine_tuning.jobs
    long = begin(client, epochs=400)
    waits = begin(client, epochs=1)  # one runs at a time
    until(lambda: len(steps(client, long.id)) > 0)
    assert jobs.retrieve(waits.id).status == "queued"
    assert jobs.pause(long.id).status == "paused"
    assert ended(client, waits.id).status == "succeeded"  # the place is free
    before = steps(client, long.id)
    with pytest.raises(openai.BadRequestError, match="is paused") as wrong:
        jobs.pause(long.id)
    assert wrong.value.code == "invalid_job_status"
    assert jobs.resume(long.id).status == "queued"
    until(lambda: len(steps(client, long.id)) > len(before))
    assert jobs.cancel(long.id).status == "cancelled"
    found = steps(client, long.id)
    assert found == list(range(1, len(found) + 1))
    messages = [one.message for one in events(client, long.id)]
    assert any(one.startswith("Fine-tuning job resumed after step") for one in messages)
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        jobs.resume(long.id)
    assert len(list(jobs.checkpoints.list(long.id))) <= 3


def test_a_pause_is_told_behind_its_step_and_its_checkpoint_has_its_place(client):
    jobs = client.fine_tuning.jobs
    job = begin(client, epochs=40, own={"save_every": 2}).id
    until(lambda: len(steps(client, job)) > 2)
    assert jobs.pause(job).status == "paused"
    told = events(client, job)
    last = steps(client, job)[-1]
    assert told[-1].message == f"The job was paused after step {last}"
    assert next(iter(jobs.checkpoints.list(job))).step_number == last
    assert [one.id for one in events(client, job)] == [one.id for one in told]
    jobs.resume(job)
    assert ended(client, job).status == "succeeded"
    saved = sorted({last, *range(2, 121, 2)})[:-4:-1]
    assert [one.step_number for one in jobs.checkpoints.list(job)] == saved
    assert [one.step_number for one in jobs.checkpoints.list(job, limit=1)] == saved  # by pages


def test_a_tenants_turn_comes_before_another_ones_second(server, client):
    jobs = client.fine_tuning.jobs
    first, second = (begin(client, epochs=400) for _ in range(2))
    with client_of(server.url, "key-of-other") as other:
        theirs = begin(other, epochs=400)
        until(lambda: jobs.retrieve(first.id).status == "running")
        jobs.cancel(first.id)
        until(lambda: other.fine_tuning.jobs.retrieve(theirs.id).status == "running")
        assert jobs.retrieve(second.id).status == "queued"
        other.fine_tuning.jobs.cancel(theirs.id)
    until(lambda: jobs.retrieve(second.id).status == "running")
    jobs.cancel(second.id)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "line 2: missing key"),
        (b'{"prompt": "a", "completion": "b"}\nnot json\n', "line 2"),
        (b'{"input": "a"}\n', "line 1: a row with 'input' is of no known format"),
        (b"\n\n", "no rows"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}\n', "line 1"),
        (b'{"input_ids": [1], "labels": [1, 2]}\n', "line 1 has 1 input_ids and 2 labels"),
    ],
)
def test_files_that_cannot_be_learned(client, content, said):
    file = client.files.create(file=("train.jsonl", content), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError) as refused:
        begin(client, training_file=file.id)
    assert said in refused.value.message
    assert (refused.value.code, refused.value.param) == ("invalid_file_format", "training_file")
    assert "jobs/" not in refused.value.message


def test_rows_of_tokens(client):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 2
    job = ended(client, begin(client, epochs=3, training_file=upload(client, rows)).id)
    assert (job.status, job.trained_tokens) == ("succeeded", 18)
    rows = [{"input_ids": [5, 6, 99999]}]
    job = ended(client, begin(client, training_file=upload(client, rows)).id)
    assert job.error.code == "invalid_training_file"
    assert "has the token 99999" in job.error.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"method": {"type": "reinforcement", "reinforcement": {"grader": {"type": "python"}}}},
            "method.reinforcement.grader: Object missing required field",
        ),
        ({"method": {"type": "magic"}}, "'magic' is not one of"),
        ({"hyperparameters": {"n_epochs": 1}}, "not both"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "not supported"),
        ({"suffix": "a/b"}, "suffix"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"extra_body": {"colour": "red"}}, "Unrecognized request argument supplied: colour"),
        ({"extra_body": {"pcg": {"peft": {"peft_type": "MAGIC"}}}}, "MAGIC"),
        ({"extra_body": {"pcg": {"peft": {**PEFT, "r": 10**9}}}}, "use at most 1024"),
        ({"extra_body": {"pcg": {"peft": {**PEFT, "lora_alpha": 1e30}}}}, "use at most 1024"),
        ({"extra_body": {"pcg": {"peft": {**PEFT, "target_modules": "(a+)+b"}}}}, "no patterns"),
        ({"extra_body": {"pcg": {"peft": {**PEFT, "rank_pattern": {"(a|a)*": 8}}}}}, "no patterns"),
        ({"extra_body": {"pcg": {"schedule": "wavy"}}}, "wavy"),
        ({"extra_body": {"pcg": {"chat_template": "{{ 1 }}"}}}, "--trust-request-chat-template"),
        ({"extra_body": {"pcg": {"chat_template_kwargs": {"messages": 1}}}}, "messages"),
        ({"extra_body": {"pcg": {"chat_template_kwargs": NESTED}}}, "nested more than 32 deep"),
        ({"extra_body": {"pcg": {"learning_rate": -1.0}}}, "learning_rate=-1.0; use a number"),
        ({"extra_body": {"pcg": {"patience": "a"}}}, "pcg.patience='a'; use a whole number or"),
        ({"extra_body": {"pcg": {"patience": 10**30}}}, "pcg.patience has an integer of more than"),
        ({"extra_body": {"pcg": {"patience": 2}}}, "no effect without eval_data"),
        ({"extra_body": {"pcg": {"max_seq_len": 8}}}, "the name here is 'max_length'"),
        ({"extra_body": {"pcg": {"data_format": "xml"}}}, "unknown data format 'xml'; use auto"),
        ({"extra_body": {"pcg": {"epochs": 3}}}, "give n_epochs instead"),
        ({"extra_body": {"pcg": {"batch_size": 3}}}, "give it among the hyperparameters"),
        ({"extra_body": {"pcg": {"checkpoint_dir": "/"}}}, "the server sets it"),
        ({"extra_body": {"pcg": {"streaming": True}}}, "a job learns one file"),
        ({"extra_body": {"pcg": {"eval_samples": 1}}}, "pcg.eval_samples: the job cannot take it"),
        ({"extra_body": {"pcg": {"chat_template": "/etc/passwd"}}}, "give the template's text"),
        (
            {"extra_body": {"pcg": {"eval_data": {"a": "file-a"}}}, "validation_file": "file-b"},
            "Give validation_file or pcg.eval_data, not both",
        ),
    ],
)
def test_jobs_that_cannot_be(client, fields, said):
    with pytest.raises(openai.BadRequestError) as refused:
        begin(client, training_file="file-x" if "suffix" in fields else upload(client), **fields)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"model": "tiny", "training_file": "\\ud800"}', 400),
        ('{"model": "tiny", "training_file": "\\u0000"}', 404),
        ('{"model": "\\ud800", "training_file": "a"}', 400),
        ('{"model": "tiny", "training_file": "a", "pcg": {"learning_rate": NaN}}', 400),
        ('{"model": "tiny", "training_file": "a", "metadata": {"\\ud800": "a"}}', 400),
    ],
)
def test_bodies_of_nobodys_client(server, body, status):
    with server.client() as plain:
        headers = {"content-type": "application/json"}
        reply = plain.post("/v1/fine_tuning/jobs", content=body, headers=headers)
        assert reply.status_code == status, reply.text
        many = "&".join(f"metadata[{n}]=x" for n in range(2000))
        assert plain.get(f"/v1/fine_tuning/jobs?{many}").status_code == 400


def test_models_that_no_job_goes_on_from(client, done):
    with pytest.raises(openai.NotFoundError):
        begin(client, model="nobody")
    with pytest.raises(openai.BadRequestError, match="leave peft out"):
        begin(client, model=done.fine_tuned_model)
    file = client.files.create(file=("a", lines_of(ROWS)), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="use one of the purpose 'fine-tune'"):
        begin(client, training_file=file.id)


def test_what_is_auto_is_resolved(client):
    file = upload(client)
    made = client.fine_tuning.jobs.create(model=serving.MODEL, training_file=file)
    assert made.hyperparameters.model_dump() == {
        "n_epochs": 16,
        "batch_size": 1,
        "learning_rate_multiplier": 1.0,
    }
    assert made.pcg["options"]["learning_rate"] == 2e-4
    assert made.pcg["peft"]["r"] == 16
    client.fine_tuning.jobs.cancel(made.id)


def test_options_are_those_of_python(client):
    """The losses are those of `executor.finetune` with the same options."""
    rows = [{**row, "weight": 1.0 + number} for number, row in enumerate(ROWS)]
    asked = [{"q": row.pop("prompt"), **row} for row in rows]
    options = {
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5.0,
        "loraplus_lr_ratio": 4.0,
        "columns": {"prompt": "q"},
        "patience": 5,
        "metric_for_best_model": "eval_b_loss",
        "gradient_accumulation_steps": 2,
        "max_grad_norm": None,
    }
    files = {name: upload(client, rows) for name, rows in (("a", asked[:1]), ("b", asked[1:3]))}
    own = {**options, "eval_data": files}
    made = begin(client, own=own, training_file=upload(client, asked), seed=3)
    job = ended(client, made.id)
    assert (job.status, job.pcg["total_steps"]) == ("succeeded", 4), job.error
    metrics = [one.data for one in events(client, job.id) if one.type == "metrics"]
    result = serving.make_executor(adapters=0).finetune(
        asked,
        peft=PEFT,
        epochs=2,
        batch_size=2,
        learning_rate=0.01,
        seed=3,
        eval_data={"a": asked[:1], "b": asked[1:3]},
        **options,
    )
    assert [one["train_loss"] for one in metrics] == pytest.approx(result.losses, rel=1e-5)
    assert [one["valid_loss"] for one in metrics[1::2]] == pytest.approx(
        [loss for _, loss in result.eval_losses], rel=1e-5
    )
    assert metrics[-1]["valid_b_loss"] > 0
    table = client.files.content(job.result_files[0]).text.splitlines()
    assert table[0].endswith(",valid_a_loss,valid_b_loss")


def test_a_validation_file_that_cannot_be_learned_is_named(client):
    half = upload(client, [{"prompt": "\ud800", "completion": "b"}])
    failed = ended(client, begin(client, epochs=1, validation_file=half).id)
    assert (failed.error.code, failed.error.param) == ("invalid_validation_file", "validation_file")
    assert failed.error.message.startswith("validation.jsonl line 1")


def test_a_name_that_no_adapter_can_have_is_refused(server, client, monkeypatch):
    catalog = server.service.part(Catalog)
    monkeypatch.setattr(catalog, "names", ("b" * 160, serving.MODEL))
    with pytest.raises(openai.BadRequestError, match="name is invalid"):
        begin(client, suffix="s" * 64)


def test_a_job_that_cannot_begin_or_end_leaves_its_place(client, monkeypatch, caplog):
    def breaks(*_):
        raise OSError("/secret/folder")

    with monkeypatch.context() as patch:
        patch.setattr(JobFolder, "saved", breaks)
        failed = ended(client, begin(client, epochs=1).id)
    assert (failed.status, failed.error.message) == ("failed", "The job failed.")
    with monkeypatch.context() as patch:
        patch.setattr("pcg.serve.jobs.progress.table_of", breaks)
        made = begin(client, epochs=1)
        until(lambda: f"the end of job {made.id} cannot be stored" in caplog.text)
    assert ended(client, begin(client, epochs=1).id).status == "succeeded"
    client.fine_tuning.jobs.cancel(made.id)


def test_a_file_that_is_deleted_while_a_job_is_made(client, monkeypatch):
    file = upload(client, [{"prompt": "of no other", "completion": "file"}])
    make = JobFolder.make

    def deletes_first(folder, *files):
        client.files.delete(file)
        make(folder, *files)

    monkeypatch.setattr(JobFolder, "make", deletes_first)
    with pytest.raises(openai.NotFoundError, match=f"No such File object: {file}"):
        begin(client, training_file=file)


def test_a_job_that_fails_says_why(client):
    made = begin(client, own={"peft": {**PEFT, "target_modules": ["no_such_module"]}})
    failed = ended(client, made.id)
    assert failed.status == "failed"
    assert "no_such_module" in failed.error.message
    assert events(client, made.id)[-1].level == "error"


def test_a_server_that_runs_no_jobs_says_so_at_once(server, client, monkeypatch):
    """As where ranks share the tokens of what is served; nothing is kept of the job."""
    facts = dataclasses.replace(server.service.client.facts, no_jobs="ranks share tokens; use cp=1")
    monkeypatch.setattr(server.service.client, "_facts", facts)
    before = len(client.fine_tuning.jobs.list().data)
    with pytest.raises(openai.BadRequestError, match=r"runs no jobs\. ranks share.*use cp=1"):
        begin(client)
    assert len(client.fine_tuning.jobs.list().data) == before

"""Jobs on preferences, and jobs that go on from a model, by the real openai client."""

import openai
import pytest

from pcg.errors import EngineError
from tests.support import serving
from tests.support.job_client import PEFT, begin, client_of, ended, events, lines_of, steps, upload
from tests.support.waiting import until

PAIRS = [
    {"prompt": f"def load_{word}(path):", "chosen": f" return {word}", "rejected": " pass"}
    for word in ("file", "table", "page", "row", "key", "name")
]
OPENAI = [
    {
        "input": {"messages": [{"role": "user", "content": row["prompt"]}]},
        "preferred_output": [{"role": "assistant", "content": row["chosen"]}],
        "non_preferred_output": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in PAIRS
]


def served(folder):
    """A server that keeps its data in a folder."""
    own = {"data_dir": folder / "data", "kv_cache_gib": 0.1, "trust_request_chat_template": True}
    return serving.on_a_port(lambda: serving.make_executor(adapters=0), max_jobs=1, **own)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with served(tmp_path_factory.mktemp("served")) as server, client_of(server.url) as client:
        yield client


def begin_dpo(client, epochs=2, own=None, **fields):
    """Make a job of three steps an epoch."""
    given = {"n_epochs": epochs, "batch_size": 2, "beta": 0.2}
    method = {"type": "dpo", "dpo": {"hyperparameters": given}}
    more = {"extra_body": {"pcg": {"peft": PEFT, "learning_rate": 0.01, **(own or {})}}}
    if "training_file" not in fields:
        fields["training_file"] = upload(client, PAIRS)
    return begin(client, **{"method": method, **more, **fields})


@pytest.fixture(scope="module")
def done(client):
    """A job that has succeeded."""
    made = begin_dpo(client, validation_file=upload(client, PAIRS[:2]), seed=7)
    return ended(client, made.id)


def test_a_job_is_told_as_it_was_resolved(done):
    assert done.status == "succeeded", done.error
    assert done.method.type == "dpo"
    found = done.method.dpo.hyperparameters
    assert (found.n_epochs, found.batch_size, found.beta) == (2, 2, 0.2)
    assert done.method.supervised is None
    assert done.pcg["options"]["reference"] == "base"
    assert done.trained_tokens > 0


def test_its_events_tell_rewards(client, done):
    assert steps(client, done.id) == [1, 2, 3, 4, 5, 6]
    metrics = [one.data for one in events(client, done.id) if one.type == "metrics"]
    assert metrics[0]["train_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert metrics[-1]["rewards/margins"] > metrics[0]["rewards/margins"]
    assert metrics[-1]["rewards/accuracies"] == 1.0
    assert metrics[2]["valid_loss"] > metrics[5]["valid_loss"]
    assert metrics[5]["valid_rewards/margins"] > metrics[2]["valid_rewards/margins"]
    table = client.files.content(done.result_files[0]).text.splitlines()
    assert "rewards/margins" in table[0].split(",")
    assert len(table) == 7


def test_openais_rows_and_pausing(client):
    made = begin_dpo(client, 300, {"save_every": 100}, training_file=upload(client, OPENAI))
    until(lambda: bool(steps(client, made.id)))
    assert client.fine_tuning.jobs.pause(made.id).status == "paused"
    names = [one.data["step"] for one in events(client, made.id) if one.type == "metrics"]
    client.fine_tuning.jobs.resume(made.id)
    until(lambda: len(steps(client, made.id)) > len(names) + 2)
    said = [one.message for one in events(client, made.id)]
    assert any("resumed after step" in one for one in said)
    assert client.fine_tuning.jobs.cancel(made.id).status == "cancelled"
    told = steps(client, made.id)
    assert told == list(range(1, len(told) + 1))
    # Its place is free.
    assert ended(client, begin_dpo(client, 1).id).status == "succeeded"


def test_a_job_goes_on_from_a_model_and_a_checkpoint(client, done):
    own = {"extra_body": {"pcg": {"learning_rate": 0.01}}}
    model = done.fine_tuned_model
    tuned = ended(client, begin(client, 1, model=model, seed=1, **own).id)
    assert (tuned.status, tuned.model) == ("succeeded", model)
    again = ended(client, begin_dpo(client, 1, model=f"{model}:ckpt-step-3", **own).id)
    assert again.status == "succeeded", again.error
    assert again.pcg["options"]["reference"] == "start"
    first = next(one.data for one in events(client, again.id) if one.type == "metrics")
    # The reference is what it starts from, so there is no reward yet.
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="leave peft out"):
        begin_dpo(client, model=model)
    with pytest.raises(openai.NotFoundError):
        begin(client, model=f"{model}:ckpt-step-1")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "line 2: missing key 'chosen'"),
        ({**OPENAI[0], "preferred_output": []}, "line 2: 'preferred_output' is"),
        ({**PAIRS[0], "rejected": PAIRS[0]["chosen"]}, "line 2: both outputs are alike"),
    ],
)
def test_rows_that_cannot_be(client, row, said):
    file = client.files.create(file=("train.jsonl", lines_of([PAIRS[0], row])), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError) as refused:
        begin_dpo(client, training_file=file.id)
    assert refused.value.code == "invalid_file_format"
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"type": "dpo", "supervised": {}}, "method.supervised has no effect"),
        ({"type": "supervised", "dpo": {}}, "method.dpo has no effect"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}, "beta"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"gamma": 1}}}, "gamma"),
    ],
)
def test_methods_that_cannot_be(client, method, said):
    with pytest.raises(openai.BadRequestError) as refused:
        begin_dpo(client, method=method)
    assert said in refused.value.message


def test_a_model_keeps_the_chat_template_of_its_job(client):
    def tokens(model):
        messages = [{"role": "user", "content": "Hello"}]
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=1)
        return reply.usage.prompt_tokens

    own = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    file = upload(client, OPENAI)
    first = ended(client, begin_dpo(client, 1, own, training_file=file).id)
    assert first.status == "succeeded", first.error
    model = first.fine_tuned_model
    learned = {"extra_body": {"pcg": {"learning_rate": 0.01}}, "training_file": file}
    again = ended(client, begin_dpo(client, 1, model=model, **learned).id)
    assert again.trained_tokens == first.trained_tokens
    counts = {tokens(name) for name in (model, f"{model}:ckpt-step-3", again.fine_tuned_model)}
    assert len(counts) == 1
    assert max(counts) < tokens(serving.MODEL)


def test_a_job_of_labelled_outputs(client):
    rows = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in PAIRS
        for name in ("chosen", "rejected")
    ]
    kto = {"type": "kto", "kto": {"hyperparameters": {"n_epochs": 2, "beta": 0.2}}}
    own = {"undesirable_weight": 0.5, "shuffle": False}
    job = ended(
        client, begin_dpo(client, own=own, method=kto, training_file=upload(client, rows)).id
    )
    assert job.status == "succeeded", job.error
    assert job.method.kto["hyperparameters"]["batch_size"] == 8
    metrics = [one.data for one in events(client, job.id) if one.type == "metrics"]
    assert metrics[0]["train_loss"] == pytest.approx(0.375, abs=1e-4)  # (0.5 + 0.5 · 0.5) / 2
    assert metrics[-1]["rewards/margins"] > 0
    with pytest.raises(openai.BadRequestError, match=r"line 1 is .* give it a 'label'"):
        begin_dpo(client, method=kto)


def test_terms_of_the_loss(client):
    own = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.1}
    job = ended(client, begin_dpo(client, 1, own).id)
    assert job.pcg["options"]["loss_weights"] == [1.0, 0.5]
    first = next(one.data for one in events(client, job.id) if one.type == "metrics")
    assert first["train_loss"] > 0.6931 + 1  # and half the cross entropy
    for own, said in (
        ({"loss_type": "cross"}, "loss_type=.*use"),
        ({"reference": "ft:another"}, "pcg.reference: the job cannot take it; use base or start"),
        ({"beta": 0.3}, "pcg.beta: .* give it among the hyperparameters"),
        ({"neftune_noise_alpha": 5}, "training on preferences has no neftune_noise_alpha"),
        ({"eval_data": {"a": upload(client, PAIRS)}}, "give validation_file"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            begin_dpo(client, own=own)


def test_a_job_goes_on_after_the_engine_ended(tmp_path, monkeypatch):
    """As after a kill: what was done behind the last checkpoint is done again, and told once."""
    from pcg.train.preference.run import Preferences

    train = Preferences.gradients

    def fails(objective, step, rate):
        if step == 4:
            raise EngineError("the engine is gone")
        return train(objective, step, rate)

    with served(tmp_path) as server, client_of(server.url) as client:
        monkeypatch.setattr(Preferences, "gradients", fails)
        made = begin_dpo(client, own={"save_every": 2}, seed=3)
        until(lambda: steps(client, made.id) == [1, 2, 3, 4])
    monkeypatch.undo()
    with served(tmp_path) as server, client_of(server.url) as client:
        job = ended(client, made.id)
        assert job.status == "succeeded", job.error
        assert steps(client, made.id) == [1, 2, 3, 4, 5, 6]
        said = [one.message for one in events(client, made.id)]
        assert "Fine-tuning job resumed after step 4" in said

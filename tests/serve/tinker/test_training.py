"""Training by the real tinker client, compared with transformers and peft; custom losses."""

import sqlite3

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.proto import response_conv

from pcg.files import SUMS
from pcg.records.run import find_runs, read_run
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.store.store import DATABASE
from pcg.serve.tinker.proto import CLASSES
from pcg.serve.tinker.records import PROTOBUF
from tests.support import compiled, oracle, tinker_client, trainer_data
from tests.support.families import BY_NAME
from tests.support.waiting import until

RATE = 1e-2
ADAM = types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def datum(row, *names):
    inputs = {name: row[name] for name in names}
    targets = [max(0, one) for one in row["targets"]]
    return types.Datum(
        model_input=types.ModelInput.from_ints(row["tokens"]),
        loss_fn_inputs={"target_tokens": targets, **inputs},
    )


def rows():
    """Data, in which what has no target has no weight."""
    found = trainer_data.sampled()
    for one in found:
        pairs = zip(one["weights"], one["targets"], strict=True)
        one["weights"] = [0.0 if target < 0 else weight for weight, target in pairs]
    return found


ROWS = rows()
DATA = [datum(one, "weights") for one in ROWS]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with tinker_client.server(tmp_path_factory.mktemp("data"), tinker_client.load) as server:
        yield server


@pytest.fixture
def client(served):
    with tinker_client.client(served.url) as made:
        yield made


def make(client, **options):
    given = {"rank": 4, "seed": 3, "train_unembed": False, **options}
    return client.create_lora_training_client(tinker_client.MODEL, **given).result()


def flat(outputs):
    return [x for one in outputs for x in one["logprobs"].tolist()]


def test_steps_are_those_of_transformers_and_peft(client, served, tmp_path):
    trained = make(client)
    trained.save_weights_for_sampler("begin").result()
    wrapped = tinker_client.peft_of(served, f"tinker://{trained.model_id}/sampler_weights/begin")
    optimizer = torch.optim.AdamW(
        [one for one in wrapped.parameters() if one.requires_grad],
        lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    for _ in range(3):
        future = trained.forward_backward(DATA, "cross_entropy")
        step = trained.optim_step(ADAM)
        found = future.result()
        assert step.result().metrics
        expected = 0.0
        for row, output in zip(ROWS, found.loss_fn_outputs, strict=True):
            logprobs = trainer_data.log_probabilities(wrapped, row)
            loss = -(torch.tensor(row["weights"]) * logprobs).sum()
            loss.backward()
            expected += loss.item()
            counts = torch.tensor(row["targets"]) >= 0
            ours = torch.tensor(output["logprobs"].tolist())
            torch.testing.assert_close(ours[counts], logprobs.detach()[counts], atol=1e-5, rtol=0)
        assert found.metrics["loss:sum"] == pytest.approx(expected, abs=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    trained.save_weights_for_sampler("end").result()
    ended = tinker_client.peft_of(served, f"tinker://{trained.model_id}/sampler_weights/end")
    for (name, ours), theirs in zip(
        oracle.lora_parameters(ended).items(), oracle.lora_parameters(wrapped).values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0, msg=name)


def test_two_chunks_are_one(client):
    whole, cut = make(client), make(client)
    one = whole.forward_backward(DATA, "cross_entropy").result()
    config = client.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    client.holder._client_config = config
    two = cut.forward_backward(DATA, "cross_entropy").result()
    assert len(two.loss_fn_outputs) == len(DATA)
    assert flat(two.loss_fn_outputs) == pytest.approx(flat(one.loss_fn_outputs), abs=1e-6)
    assert two.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], abs=1e-5)
    norms = [model.optim_step(ADAM).result().metrics["grad_norm:mean"] for model in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_state_goes_on_to_the_same_bits(client, served):
    first = make(client)
    first.forward_backward(DATA, "cross_entropy")
    first.optim_step(ADAM).result()
    saved = first.save_state("half").result()
    with_optimizer = client.create_training_client_from_state_with_optimizer(saved.path).result()
    without = client.create_training_client_from_state(saved.path).result()
    losses = []
    for model in (first, with_optimizer, without):
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step(ADAM).result()
        last = model.forward(DATA, "cross_entropy").result()
        losses.append(flat(last.loss_fn_outputs))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert with_optimizer.get_info().lora_rank == 4
    with pytest.raises(tinker.RequestFailedError, match="already"):
        first.save_state("half").result()
    first.save_state("half", overwrite=True).result()
    assert first.forward(DATA, "cross_entropy").result().metrics  # what failed did nothing
    # A client of before loads into a model that is there.
    with tinker_client.raw(served.url) as raw:
        for path, says in ((saved.path, "path"), ("tinker://no/weights/such", "error")):
            body = {"model_id": first.model_id, "path": path, "optimizer": True}
            promise = raw.post("load_weights", json=body).json()
            assert says in tinker_client.result(raw, promise)
        promise = raw.post("unload_model", json={"model_id": first.model_id}).json()
        assert tinker_client.result(raw, promise)["type"] == "unload_model"
        ask = {"model_id": first.model_id, "adam_params": {}}
        until(lambda: raw.post("optim_step", json=ask).status_code == 410)


def test_losses_of_reinforcement_learning(client):
    model = make(client)
    data = [datum(one, "logprobs", "advantages") for one in ROWS]
    found = model.forward_backward(data, "importance_sampling").result()
    lp = torch.tensor(flat(found.loss_fn_outputs), dtype=torch.float64)
    sampled, advantages = (
        torch.tensor([x for one in ROWS for x in one[name]], dtype=torch.float64)
        for name in ("logprobs", "advantages")
    )
    expected = -((lp - sampled).exp() * advantages).sum()
    assert found.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    given = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    clipped = model.forward_backward(data, "ppo", given).result()
    ratio = (lp - sampled).exp()
    expected = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).sum()
    assert clipped.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="loss"):
        model.forward_backward(data, "no_such_loss").result()
    assert model.optim_step(ADAM).result().metrics


def test_what_was_trained_is_sampled_from(client):
    model = make(client)
    model.forward_backward(DATA, "cross_entropy")
    model.optim_step(ADAM)
    scored = model.forward(DATA[:1], "cross_entropy").result()
    named = model.save_weights_for_sampler("for-samples").result()
    (row, *_) = ROWS
    prompt = types.ModelInput.from_ints([*row["tokens"], max(0, row["targets"][-1])])
    for sampler in (
        model.save_weights_and_get_sampling_client(),
        client.create_sampling_client(model_path=named.path),
    ):
        found = sampler.result().compute_logprobs(prompt).result()
        given = [x for x, target in zip(found[1:], row["targets"], strict=True) if target >= 0]
        ours = scored.loss_fn_outputs[0]["logprobs"].tolist()[-len(given) :]
        assert given == pytest.approx(ours, abs=1e-5)


def test_a_step_serves_from_memory_and_from_files_behind_a_restart(tmp_path, monkeypatch):
    def scored(url, session, seq):
        asked = {"sampling_session_id": session, "seq_id": seq, "prompt_logprobs": True}
        body = tinker_client.sample([5, 8, 13, 21], **asked)
        with tinker_client.raw(url) as raw:
            promise = raw.post("asample", json=body).json()
            ask = {"request_id": promise["request_id"]}

            def answer():
                return raw.post("retrieve_future", json=ask)

            until(lambda: answer().headers["content-type"] == "application/x-protobuf")
            found = response_conv.deserialize_sample_response(answer().content)
        return found.prompt_logprobs[1:]

    async def load(*_, **__):
        raise AssertionError("the weights are in the engine already")

    with tinker_client.server(tmp_path) as served:
        made = tinker.ServiceClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY)
        model = made.create_lora_training_client(tinker_client.MODEL, rank=4, seed=0).result(60)
        one = types.Datum(
            model_input=types.ModelInput.from_ints([5, 8, 13]),
            loss_fn_inputs={"target_tokens": [8, 13, 21], "weights": [1.0, 1.0, 1.0]},
        )
        sessions, expected = [], []
        with monkeypatch.context() as patched:
            patched.setattr(served.service.part(Catalog).loader, "load", load)
            for _ in range(2):
                model.forward_backward([one], "cross_entropy")
                model.optim_step(types.AdamParams(learning_rate=0.05)).result(60)
                sampler = model.save_weights_and_get_sampling_client().result(60)
                sessions.append(sampler._sampling_session_id)
                score = model.forward([one], "cross_entropy").result(60)
                expected.append(score.loss_fn_outputs[0]["logprobs"].to_numpy())
            # The first one is served on, though the model was trained since.
            found = [scored(served.url, session, 0) for session in sessions]
        (folder,) = find_runs(tmp_path)
        run = read_run(folder)
        assert (run.status, run.facts.kind, run.facts.name) == ("running", "tinker", model.model_id)
        assert run.config["lora"]["rank"] == 4
        assert [step for step, _ in run.series["loss"]] == [1, 2]
        losses = [-expected[0].sum().item(), run.last("loss")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)  # of the second, before its update
        assert run.last("learning_rate") == 0.05
        assert run.last("tokens") == 3
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.abs(expected[0] - expected[1]).max() > 1e-3
    with tinker_client.server(tmp_path) as served:
        again = [scored(served.url, session, 1) for session in sessions]
        np.testing.assert_allclose(again, expected, atol=1e-5)
        assert read_run(folder).status == "interrupted"
        targets = {"data": [8, 13, 21], "dtype": "int64", "shape": [3]}
        row = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 8, 13]}]},
            "loss_fn_inputs": {"target_tokens": targets},
        }
        given = {"data": [row], "loss_fn": "cross_entropy"}
        with tinker_client.raw(served.url) as raw:
            body = {"model_id": model.model_id, "forward_backward_input": given}
            assert raw.post("forward_backward", json=body).status_code == 200
            step = {"model_id": model.model_id, "adam_params": {"learning_rate": 0.05}}
            assert raw.post("optim_step", json=step).status_code == 200
        until(lambda: [step for step, _ in read_run(folder).series["loss"]] == [1, 2, 3])
        made.holder.run_coroutine_threadsafe(made.holder.aclose()).result(60)


TOKENS = [[5, 8, 13, 21, 34], [3, 7, 9]]


def data(width=None):
    """Data with a target of each token, or several, with weights of either sign."""
    found = []
    for row in TOKENS:
        shape = (len(row) - 1,) if width is None else (len(row) - 1, width)
        generator = np.random.default_rng(len(row))
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": generator.integers(0, 40, shape),
                    "weights": generator.normal(size=shape).astype(np.float32),
                },
            )
        )
    return found


def cross_entropy(given, logprobs):
    total = torch.zeros(())
    for one, found in zip(given, logprobs, strict=True):
        total = total - (one.loss_fn_inputs["weights"].to_torch() * found).sum()
    return total, {"terms:sum": float(len(given))}


def test_a_cross_entropy_of_the_clients_is_the_built_in_one(tmp_path):
    with tinker_client.server(tmp_path) as served, tinker_client.client(served.url) as client:
        found = []
        for is_custom in (False, True):
            made = client.create_lora_training_client(
                base_model=tinker_client.MODEL, rank=4, seed=0
            ).result(60)
            for width in (None, 3):
                if is_custom:
                    done = made.forward_backward_custom(data(width), cross_entropy).result(60)
                    assert done.metrics["terms:sum"] == 2
                else:
                    done = made.forward_backward(data(width), "cross_entropy").result(60)
                    found.append(done.metrics["loss:sum"])
                shapes = [one["logprobs"].shape for one in done.loss_fn_outputs]
                assert shapes == [one.loss_fn_inputs["weights"].shape for one in data(width)]
            made.optim_step(types.AdamParams(learning_rate=0.05)).result(60)
            sampler = made.save_weights_and_get_sampling_client().result(60)
            prompt = types.ModelInput.from_ints(TOKENS[0])
            found.append(sampler.compute_logprobs(prompt).result(60)[1:])
        assert found[2] == pytest.approx(found[3], abs=1e-5)
        base = client.create_sampling_client(base_model=tinker_client.MODEL).result(60)
        before = base.compute_logprobs(types.ModelInput.from_ints(TOKENS[0])).result(60)[1:]
        assert max(abs(a - b) for a, b in zip(before, found[2], strict=True)) > 0.01


def gained(logprobs: torch.Tensor, advantages: torch.Tensor, old: torch.Tensor):
    """A loss of the server's, one datum at a time: PPO with a penalty of its own."""
    ratios = (logprobs - old).exp()
    near = ratios.clamp(0.8, 1.2)
    kl = (torch.exp(old - logprobs) - 1 - (old - logprobs)).sum()
    loss = 0.1 * kl - torch.minimum(ratios * advantages, near * advantages).sum()
    return loss, {"custom/kl:mean": kl, "custom/ratio:sum": ratios.sum()}


def rewarded(count):
    draw = np.random.default_rng(7)
    found = []
    for index in range(count):
        size = 3 + index
        inputs = {
            "target_tokens": draw.integers(0, 40, size),
            "advantages": draw.normal(size=size).astype(np.float32),
            "old": -draw.random(size).astype(np.float32) * 4,
            "mask": np.ones(size, np.float32),  # the loss does not read it
        }
        tokens = draw.integers(0, 40, size).tolist()
        found.append(types.Datum(types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return found


def by_hand(given, logprobs):
    """The same in the client, as `forward_backward_custom` takes a function."""
    total, kl = torch.zeros(()), 0.0
    for one, found in zip(given, logprobs, strict=True):
        fields = one.loss_fn_inputs
        loss, told = gained(found, fields["advantages"].to_torch(), fields["old"].to_torch())
        total, kl = total + loss, kl + told["custom/kl:mean"].item()
    return total, {"custom/kl:mean": kl / len(given)}


def test_a_loss_that_the_server_runs_trains_as_the_clients_own(tmp_path):
    with tinker_client.server(tmp_path) as served, tinker_client.client(served.url) as client:
        ranks = {"logprobs": 1, "advantages": 1, "old": 1}
        handle = client.create_custom_loss(gained, ranks).result(60)
        assert handle.loss_id is not None  # so that the client sends its name alone
        found = []
        for loss in (handle, by_hand):
            made = client.create_lora_training_client(
                base_model=tinker_client.MODEL, rank=4, seed=0
            ).result(60)
            for _ in range(2):
                done = made.forward_backward_custom(rewarded(5), loss).result(60)
                made.optim_step(types.AdamParams(learning_rate=0.02)).result(60)
            after = made.forward(data(), "cross_entropy").result(60)
            logprobs = np.concatenate([one["logprobs"].to_numpy() for one in after.loss_fn_outputs])
            found.append((done.metrics["loss:sum"], done.metrics["custom/kl:mean"], logprobs))
        (mine, kl, logprobs), (theirs, their_kl, their_logprobs) = found
        assert mine == pytest.approx(theirs, abs=1e-4)
        assert kl == pytest.approx(their_kl, abs=1e-4)
        np.testing.assert_allclose(logprobs, their_logprobs, atol=1e-4)

        with tinker_client.client(served.url) as stranger:  # another session knows no such loss
            other = stranger.create_lora_training_client(tinker_client.MODEL, rank=2).result(60)
            ask = other.forward_backward(rewarded(1), "custom", {"loss_id": handle.loss_id})
            with pytest.raises(tinker.RequestFailedError, match="no custom loss"):
                ask.result(60)

        def product(logprobs: torch.Tensor):
            return torch.outer(logprobs, logprobs).sum(), {}

        with pytest.raises(tinker.BadRequestError, match=r"torch\.outer"):
            client.create_custom_loss(product, {"logprobs": 1}).result(60)

        def named(logprobs: torch.Tensor, missing: torch.Tensor):
            return (logprobs * missing).sum(), {}

        handle = client.create_custom_loss(named, {"logprobs": 1, "missing": 1}).result(60)
        ask = made.forward_backward(rewarded(1), "custom", {"loss_id": handle.loss_id})
        with pytest.raises(tinker.RequestFailedError, match="no 'missing', which the loss reads"):
            ask.result(60)


def test_a_loss_outlasts_the_server(tmp_path):
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        session = tinker_client.new_session(raw)
        nodes = [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "all", "target": "sum", "args": [{"ref": "logprobs"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "all"}, {"dict": {}}]}],
            },
        ]
        body = {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "all",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": nodes},
        }
        promise = raw.post("create_custom_loss", json=body).json()
        assert raw.post("create_custom_loss", json=body).json() == promise
        told = tinker_client.result(raw, promise)
    # A promise that was not settled when the server ended.
    with sqlite3.connect(tmp_path / DATABASE) as rows:
        rows.execute("UPDATE tinker_futures SET state = 'pending', result = NULL")
    (tmp_path / SUMS).unlink()
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        assert tinker_client.result(raw, promise) == told
        assert told["loss_id"].startswith("loss-")


def test_experts_of_samples_are_replayed(tmp_path):
    """A sample's experts are a tensor beside its tokens, which a datum takes as it is."""
    model = oracle.random_model(BY_NAME["mixtral"].config(2))
    prompt = [5, 8, 13]
    with (
        tinker_client.server(tmp_path, lambda: compiled.executor(model)) as served,
        tinker_client.client(served.url) as client,
    ):
        trained = make(client, train_mlp=False)
        with tinker_client.raw(served.url) as raw:
            body = tinker_client.sample(prompt, base_model=tinker_client.MODEL, routed_experts=True)
            ask = {"request_id": raw.post("asample", json=body).json()["request_id"]}

            def answer():
                return raw.post("retrieve_future", json=ask)

            until(lambda: answer().headers["content-type"] == PROTOBUF)
            message = CLASSES["SampleResponse"].FromString(answer().content)
        (sampled,) = message.sequences
        tokens = [*prompt, *np.frombuffer(sampled.tokens, "<i4").tolist()]
        found = sampled.routed_experts
        routes = np.frombuffer(found.dense, "<i8").reshape(tuple(found.shape))
        assert routes.shape == (len(tokens) - 1, 2 * 2)

        def logprobs(chosen):
            given = types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": np.array(tokens[1:]),
                    "weights": np.ones(len(tokens) - 1, np.float32),
                    "routed_experts": chosen,
                },
            )
            return flat(trained.forward([given], "cross_entropy").result().loss_fn_outputs)

        own = logprobs(np.full_like(routes, -1))
        assert logprobs(routes) == pytest.approx(own, abs=1e-6)
        assert max(map(abs, np.subtract(logprobs((routes + 1) % 4), own))) > 1e-3
        behind = own[len(prompt) - 1 :]
        assert behind == pytest.approx(np.frombuffer(sampled.logprobs, "<f4"), abs=1e-5)

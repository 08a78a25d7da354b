"""Training by the real tinker client, compared with transformers and peft, and with itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.proto import response_conv

from pcg.records.run import find_runs, read_run
from pcg.serve.adapters.catalog import Catalog
from tests.support import oracle, serving, tinker_client, trainer_data
from tests.support.waiting import until

RATE = 1e-2
ADAM = types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def datum(row: dict[str, Any], *names: str) -> types.Datum:
    inputs = {name: row[name] for name in names}
    targets = [max(0, one) for one in row["targets"]]
    return types.Datum(
        model_input=types.ModelInput.from_ints(row["tokens"]),
        loss_fn_inputs={"target_tokens": targets, **inputs},
    )


def rows() -> list[dict[str, Any]]:
    """Data, in which what has no target has no weight."""
    found = trainer_data.sampled()
    for one in found:
        pairs = zip(one["weights"], one["targets"], strict=True)
        one["weights"] = [0.0 if target < 0 else weight for weight, target in pairs]
    return found


ROWS = rows()
DATA = [datum(one, "weights") for one in ROWS]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Served]:
    with tinker_client.server(tmp_path_factory.mktemp("data"), tinker_client.load) as server:
        yield server


@pytest.fixture
def client(served: serving.Served) -> Iterator[tinker.ServiceClient]:
    with tinker_client.client(served.url) as made:
        yield made


def make(client: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    given = {"rank": 4, "seed": 3, "train_unembed": False, **options}
    return client.create_lora_training_client(tinker_client.MODEL, **given).result()


def flat(outputs: list[Any]) -> list[float]:
    return [x for one in outputs for x in one["logprobs"].tolist()]


def test_steps_are_those_of_transformers_and_peft(
    client: tinker.ServiceClient, served: serving.Served, tmp_path: Path
) -> None:
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
        oracle.lora_parameters(ended).items(),
        oracle.lora_parameters(wrapped).values(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0, msg=name)


def test_two_chunks_are_one(client: tinker.ServiceClient) -> None:
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


def test_a_state_goes_on_to_the_same_bits(
    client: tinker.ServiceClient, served: serving.Served
) -> None:
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


def test_losses_of_reinforcement_learning(client: tinker.ServiceClient) -> None:
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
        model.forward_backward(data, "no_such_loss").result()  # type: ignore[arg-type]
    assert model.optim_step(ADAM).result().metrics


def test_what_was_trained_is_sampled_from(client: tinker.ServiceClient) -> None:
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


def test_a_step_serves_from_memory_and_from_files_behind_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 8, 13, 21]}]}

    def scored(url: str, session: str, seq: int) -> Any:
        body = {
            "sampling_session_id": session, "seq_id": seq, "prompt": prompt,
            "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True,
        }  # fmt: skip
        with tinker_client.raw(url) as raw:
            promise = raw.post("asample", json=body).json()
            ask = {"request_id": promise["request_id"]}

            def answer() -> httpx2.Response:
                return raw.post("retrieve_future", json=ask)

            until(lambda: answer().headers["content-type"] == "application/x-protobuf")
            found = response_conv.deserialize_sample_response(answer().content)
        assert found.prompt_logprobs is not None
        return found.prompt_logprobs[1:]

    async def load(*_: object, **__: object) -> None:
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

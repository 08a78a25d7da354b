"""Runs, checkpoints, sampling of them, sessions and downloads, by the real tinker client."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import tinker
from safetensors import safe_open
from tinker import types

from pcg.keys import digest_of
from pcg.serve.tinker import records
from pcg.serve.tinker.tinker import Links
from tests.support import tinker_client
from tests.support.waiting import until

OTHER = "tml-of-another-tenant"
TOKENS = [5, 8, 13, 21, 34, 7, 9]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    other = {
        "name": "other",
        "sha256": digest_of(OTHER).hex(),
        "scopes": ["train"],
        "tenant": "other",
    }
    keys.write_text(json.dumps([other]))
    with tinker_client.server(tmp_path_factory.mktemp("data"), api_keys=keys) as one:
        yield one


@pytest.fixture(scope="module")
def service(served):
    with tinker_client.client(served.url) as client:
        yield client


@pytest.fixture(scope="module")
def trained(service):
    """A model after an update that changes much."""
    made = service.create_lora_training_client(
        base_model=tinker_client.MODEL, rank=4, seed=0, user_metadata={"a": "b"}
    ).result(60)
    data = [datum(TOKENS)]
    for _ in range(2):
        made.forward_backward(data, "cross_entropy").result(60)
        made.optim_step(types.AdamParams(learning_rate=0.05)).result(60)
    return made


def datum(tokens):
    weights = np.ones(len(tokens) - 1, np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )


def trained_logprobs(client, tokens):
    done = client.forward([datum(tokens)], "cross_entropy").result(60)
    return done.loss_fn_outputs[0]["logprobs"].to_numpy()


@pytest.mark.parametrize("how", ["ephemeral", "named", "state"])
def test_what_a_model_samples_has_the_logprobs_of_forward_backward(service, trained, how):
    if how == "ephemeral":
        sampler = trained.save_weights_and_get_sampling_client().result(60)
    elif how == "named":
        path = trained.save_weights_for_sampler("named").result(60).path
        sampler = service.create_sampling_client(model_path=path).result(60)
    else:
        path = trained.save_state("state").result(60).path
        sampler = service.create_sampling_client(model_path=path).result(60)
    params = types.SamplingParams(max_tokens=8, seed=1, temperature=1.0, stop=[])
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    done = sampler.sample(
        prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True
    ).result(60)
    for one in done.sequences:
        whole = [*TOKENS[:3], *one.tokens]
        expected = trained_logprobs(trained, whole)
        np.testing.assert_allclose(one.logprobs, expected[2:], rtol=0, atol=1e-5)
        np.testing.assert_allclose(done.prompt_logprobs[1:], expected[:2], rtol=0, atol=1e-5)
    base = service.create_sampling_client(base_model=tinker_client.MODEL).result(60)
    others = base.compute_logprobs(types.ModelInput.from_ints(whole)).result(60)
    assert max(abs(a - b) for a, b in zip(others[1:], expected, strict=True)) > 0.01


def test_runs_and_checkpoints_are_listed_changed_and_deleted(service, trained, served):
    rest = tinker.RestClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY)
    state = trained.save_state("kept", ttl_seconds=3600).result(60).path
    weights = trained.save_weights_for_sampler("weights").result(60).path
    run = rest.get_training_run_by_tinker_path(state).result(60)
    assert (run.base_model, run.lora_rank, run.is_lora) == (tinker_client.MODEL, 4, True)
    assert run.user_metadata == {"a": "b"}
    assert run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint.tinker_path == weights
    runs = rest.list_training_runs().result(60)
    assert run.training_run_id in [one.training_run_id for one in runs.training_runs]
    assert runs.cursor.total_count == len(runs.training_runs)
    of_run = rest.list_checkpoints(run.training_run_id).result(60).checkpoints
    found = {one.tinker_path: one for one in of_run}
    assert found[state].checkpoint_type == "training"
    assert found[state].expires_at is not None
    assert found[weights].size_bytes > 0
    page = rest.list_user_checkpoints(limit=1).result(60)
    assert len(page.checkpoints) == 1
    assert page.cursor.total_count == len(of_run)
    rest.publish_checkpoint_from_tinker_path(weights).result(60)
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result(60)
    again = {
        one.tinker_path: one
        for one in rest.list_checkpoints(run.training_run_id).result(60).checkpoints
    }
    assert again[weights].public
    assert again[state].expires_at is None
    rest.unpublish_checkpoint_from_tinker_path(weights).result(60)
    sampler = service.create_sampling_client(model_path=weights).result(60)
    rest.delete_checkpoint_from_tinker_path(weights).result(60)
    left = rest.list_checkpoints(run.training_run_id).result(60).checkpoints
    assert weights not in [one.tinker_path for one in left]
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(weights).result(60)
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path=weights).result(60)
    with pytest.raises(tinker.RequestFailedError):  # it was never loaded
        sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(60)
    with tinker_client.raw(served.url) as raw:
        for path in ("weights/../kept", "weights/%2e%2e", "other/kept"):
            url = f"training_runs/{run.training_run_id}/checkpoints/{path}"
            assert raw.delete(url).status_code in (400, 404, 405)


def test_external_weights_are_downloaded_without_a_key_by_their_links_alone(
    service, trained, served, tmp_path
):
    path = trained.save_weights_external("for-others").result(60).path
    rest = tinker.RestClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY)
    found = rest.get_external_weights_urls(path).result(60)
    names = ["SHA256SUMS", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(found.urls) == names
    url = found.urls["adapter_model.safetensors"]
    with urllib.request.urlopen(url, timeout=60) as reply:
        (tmp_path / "a.safetensors").write_bytes(reply.read())
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert any(name.endswith("lora_A.weight") for name in file.keys())  # noqa: SIM118
    for other in (url[:-1], url.replace("adapter_model.safetensors", "adapter_config.json")):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(other, timeout=60)
    kept = served.service.part(Links)._links
    for path_of_link, link in kept.items():
        kept[path_of_link] = replace(link, until_s=0.0)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=60)


def test_what_another_tenant_owns_is_not_there_unless_it_is_published(trained, served):
    path = trained.save_weights_for_sampler("shared").result(60).path
    run, kind, name = path.removeprefix("tinker://").split("/")
    session = run.partition(":")[0]
    one = f"training_runs/{run}/checkpoints/{kind}/{name}"
    ask = tinker_client.sample(TOKENS, model_path=path)
    with tinker_client.raw(served.url) as own, tinker_client.raw(served.url) as other:
        other.headers["x-api-key"] = OTHER

        def sampled():
            promise = other.post("asample", json=ask).json()
            reply = other.post("retrieve_future", json={"request_id": promise["request_id"]})
            mine = own.post("retrieve_future", json={"request_id": promise["request_id"]})
            assert mine.status_code == 410
            return reply.headers["content-type"] == "application/x-protobuf"

        assert other.get("training_runs").json()["training_runs"] == []
        assert other.get("checkpoints").json()["checkpoints"] == []
        assert other.get("sessions").json() == {"sessions": []}
        for method, path in (
            ("GET", f"training_runs/{run}"),
            ("GET", f"training_runs/{run}/checkpoints"),
            ("GET", f"sessions/{session}"),
            ("GET", f"{one}/external_weights_urls"),
            ("DELETE", one),
            ("POST", f"{one}/publish"),
            ("PUT", f"{one}/ttl"),
        ):
            body = {"json": {"ttl_seconds": 1}} if method == "PUT" else {}
            assert other.request(method, path, **body).status_code == 404, path
        assert not sampled()
        assert own.post(f"{one}/publish").status_code == 204
        assert sampled()
        assert other.delete(one).status_code == 404
        assert own.delete(f"{one}/publish").status_code == 204
        assert not sampled()


def test_sessions_are_listed_with_what_was_made_in_them(service, trained, served):
    rest = tinker.RestClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY)
    session = service.holder.get_session_id()
    assert session in rest.list_sessions().result(60).sessions
    found = rest.get_session(session).result(60)
    assert found.training_run_ids == [f"{session}:train:0"]
    assert all(one.startswith("smp-") for one in found.sampler_ids)
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("ses-none").result(60)


def test_weights_of_a_session_go_with_it_and_only_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_EPHEMERAL", 2)
    with tinker_client.server(tmp_path) as served:
        folder = tmp_path / "tinker"
        with tinker_client.client(served.url) as client:
            made = client.create_lora_training_client(
                base_model=tinker_client.MODEL, rank=2
            ).result(60)
            samplers = [made.save_weights_and_get_sampling_client().result(60) for _ in range(3)]
            prompt = types.ModelInput.from_ints(TOKENS)
            assert len(samplers[2].compute_logprobs(prompt).result(60)) == len(TOKENS)
            with pytest.raises(tinker.NotFoundError):
                samplers[0].compute_logprobs(prompt).result(60)
            until(lambda: len(list(folder.glob("*/adapter_config.json"))) <= 3)
            session = client.holder.get_session_id()
        with tinker_client.raw(served.url) as raw:
            raw.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
        until(lambda: not list(folder.glob("*/adapter_config.json")))


def test_a_copy_outlasts_what_it_was_copied_of(service, trained, served):
    rest = tinker.RestClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY)
    source = trained.save_weights_for_sampler("copied").result(60).path
    copy = rest.copy_weights(source, "any-project", ttl_seconds=7200).result(60)
    assert copy != source
    assert copy.endswith("/sampler_weights/copied")
    (listed,) = [
        one
        for one in rest.list_user_checkpoints().result(60).checkpoints
        if one.tinker_path == copy
    ]
    assert listed.expires_at is not None
    rest.delete_checkpoint_from_tinker_path(source).result(60)
    prompt = types.ModelInput.from_ints(TOKENS)
    sampler = service.create_sampling_client(model_path=copy)
    found = sampler.result(60).compute_logprobs(prompt).result(60)[1:]
    own = trained.save_weights_and_get_sampling_client().result(60)
    assert found == pytest.approx(own.compute_logprobs(prompt).result(60)[1:], abs=1e-5)

    body = {"source_path": copy, "destination_project_id": "p"}
    again = {**body, "session_id": "ses-of-nobody", "model_seq_id": 1}
    del again["destination_project_id"]
    with tinker_client.raw(served.url) as raw:
        first, second = (
            raw.post("copy_weights", json=body, headers={"x-idempotency-key": "a"}).json()
            for _ in range(2)
        )
        assert first == second
        for given, headers, status in (
            ({**body, "source_path": source}, {}, 404),
            ({**body, "session_id": "ses-a"}, {}, 400),
            ({**again, "session_id": "copy-of-nobody"}, {}, 410),
            (body, {"x-tinker-weights-access-token": "a"}, 400),
            (again, {}, 410),
        ):
            assert raw.post("copy_weights", json=given, headers=headers).status_code == status
        session = service.holder.get_session_id()
        place = {"session_id": session, "model_seq_id": 77}
        there = {"source_path": copy, **place}
        path = raw.post("copy_weights", json=there).json()["tinker_path"]
        assert path == f"tinker://{session}:train:77/sampler_weights/copied"
        assert raw.post("copy_weights", json=there).json()["tinker_path"] == path
        made = {**place, "base_model": tinker_client.MODEL, "lora_config": {"rank": 2}}
        assert raw.post("create_model", json=made).status_code == 400
        assert raw.post("copy_weights", json={**there, "model_seq_id": 0}).status_code == 400
        stranger = {"x-api-key": OTHER}
        assert raw.post("copy_weights", json=body, headers=stranger).status_code == 404

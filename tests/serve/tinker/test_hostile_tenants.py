"""Tenants that mean harm: to others, to what was promised, or to the room that they have."""

import asyncio
import json
from dataclasses import replace

import pytest
from tinker.proto import tinker_public_pb2 as pb

from pcg.keys import digest_of, open_keys
from pcg.serve.http.caller import Authentication, Caller
from pcg.serve.tinker.records import find_checkpoint
from pcg.serve.tinker.tinker import LINKS, MOST_LINKS, Links, Tinker
from tests.support import tinker_client
from tests.support.tinker_client import model_of, new_session, result
from tests.support.waiting import until

OTHER = "tml-of-another-tenant"
TOKENS = [5, 8, 13, 21, 34, 7]
END = {"reason": {"type": "success"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    row = {"name": "b", "sha256": digest_of(OTHER).hex(), "scopes": ["train"], "tenant": "b"}
    keys.write_text(json.dumps([row]))
    with tinker_client.server(tmp_path_factory.mktemp("data"), api_keys=keys) as server:
        yield server


@pytest.fixture
def raw(served):
    with tinker_client.raw(served.url) as client:
        yield client


@pytest.fixture
def other(served):
    with tinker_client.raw(served.url) as client:
        client.headers["x-api-key"] = OTHER
        yield client


def post(client, path, body):
    """The reply to a body; Python's JSON writes any text and number."""
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def passed(model, seq):
    targets = {"data": [*TOKENS[1:], 1], "dtype": "int64"}
    datum = {
        "model_input": {"chunks": [{"tokens": TOKENS}]},
        "loss_fn_inputs": {"target_tokens": targets},
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq, "forward_backward_input": given}


def test_a_place_of_another_kind_of_request_is_refused(raw):
    model = model_of(raw)
    first = post(raw, "forward_backward", passed(model, 1)).json()
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert post(raw, "forward_backward", passed(model, 1)).json() == first
    reply = post(raw, "optim_step", step)
    assert reply.status_code == 400
    assert "forward_backward" in reply.json()["error"]["message"]
    post(raw, "optim_step", {**step, "seq_id": 4096})
    assert post(raw, "unload_model", {"model_id": model}).status_code == 200


def test_what_comes_behind_a_refused_request_does_not_wait_for_it(raw):
    model = model_of(raw)
    last = post(raw, "forward_backward", passed(model, 6)).json()
    save = {"model_id": model, "path": "a", "ttl_seconds": 60}
    assert post(raw, "save_weights", {**save, "seq_id": 1}).status_code == 400
    sampler = {"model_id": model, "seq_id": 2, "path": "a", "kind": "inflight"}
    assert post(raw, "save_weights_for_sampler", sampler).status_code == 400
    call = pb.ForwardBackwardRequest(model_id=model, seq_id=3, loss_fn="cross_entropy")
    call.data.add().model_input.add().image.format = "png"
    kind = {"content-type": "application/x-protobuf"}
    body = call.SerializeToString()
    assert raw.post("forward_backward", content=body, headers=kind).status_code == 400
    wrong = passed(model, 4)
    wrong["forward_backward_input"]["loss_fn"] = 1
    assert post(raw, "forward_backward", wrong).status_code == 400
    assert post(raw, "load_weights", {"model_id": model, "seq_id": 5}).status_code == 400
    assert result(raw, last)["metrics"]
    # Until something comes behind it, a place may be tried again.
    assert post(raw, "save_weights", {**save, "seq_id": 7}).status_code == 400
    right = {**save, "seq_id": 7, "ttl_seconds": 3600}
    assert result(raw, post(raw, "save_weights", right).json())["path"].endswith("/weights/a")


def test_others_cannot_have_places_skipped(raw, other, served):
    model = model_of(raw)
    streams = served.service.part(Tinker).models._streams
    refused = {"model_id": model, "seq_id": 1, "adam_params": {"x": 1}}
    assert post(other, "optim_step", refused).status_code == 400
    assert streams[model]._refused == set()
    assert post(raw, "optim_step", {**refused, "seq_id": 10**6}).status_code == 400
    assert streams[model]._refused == set()
    assert post(raw, "optim_step", refused).status_code == 400
    assert streams[model]._refused == {1}


@pytest.mark.parametrize("text", [{"\ud800": "a"}, {"a": ["\udfff"]}])
def test_half_characters_are_refused_where_they_would_be_listed(raw, text):
    reply = post(raw, "create_session", {"user_metadata": text})
    assert reply.status_code == 400
    assert "unpaired surrogate" in reply.json()["error"]["message"]


def test_bad_numbers_and_kinds_are_refused_by_name(raw):
    model = model_of(raw)
    clip = {"model_id": model, "seq_id": 1, "adam_params": {"grad_clip_norm": -1}}
    reply = post(raw, "optim_step", clip)
    assert reply.status_code == 400
    assert "grad_clip_norm" in reply.json()["error"]["message"]
    chunk = {"type": "\ud800", "tokens": [1]}
    ask = {"base_model": tinker_client.MODEL, "prompt": {"chunks": [chunk]}, "sampling_params": {}}
    reply = post(raw, "asample", ask)
    assert reply.status_code == 400
    assert "encoded_text" in reply.json()["error"]["message"]


def test_a_sampling_session_ends_with_the_right_to_its_checkpoint(raw, other):
    model = model_of(raw)
    save = {"model_id": model, "seq_id": 1, "path": "shared"}
    path = result(raw, post(raw, "save_weights_for_sampler", save).json())["path"]
    one = f"training_runs/{model}/checkpoints/sampler_weights/shared"
    assert raw.post(f"{one}/publish").status_code == 204
    ask = {"session_id": new_session(other), "sampling_session_seq_id": 0, "model_path": path}
    sampler = post(other, "create_sampling_session", ask).json()["sampling_session_id"]

    def sample(seq):
        body = tinker_client.sample(TOKENS, sampling_session_id=sampler, seq_id=seq)
        promise = post(other, "asample", body).json()

        def reply():
            return post(other, "retrieve_future", {"request_id": promise["request_id"]})

        until(lambda: b"try_again" not in reply().content)
        return reply()

    assert sample(0).headers["content-type"] == "application/x-protobuf"
    assert raw.delete(f"{one}/publish").status_code == 204
    said = sample(1).json()
    assert (said["category"], "no checkpoint" in said["error"]) == ("user", True)


def test_weights_of_sampling_sessions_count_among_what_a_tenant_keeps(raw, served, monkeypatch):
    model = model_of(raw)
    operations = served.service.part(Tinker).models._operations

    def save(seq):
        body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
        found = result(raw, post(raw, "save_weights_for_sampler", body).json())
        return found

    assert save(1)["sampling_session_id"]
    monkeypatch.setattr(operations, "_most", (1000, 1))
    assert "delete some" in save(2)["error"]


def test_weights_for_a_session_that_ends_meanwhile_are_not_kept(raw, served, monkeypatch):
    id = new_session(raw)
    model = model_of(raw, id)
    tinker = served.service.part(Tinker)
    operations = tinker.models._operations
    keep_state = operations.keep_state
    folders = []

    async def keep_late(record):
        folders.append(await keep_state(record))
        while tinker.sessions.is_open(record.session):
            await asyncio.sleep(0.01)
        return folders[0]

    monkeypatch.setattr(operations, "keep_state", keep_late)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
    promise = post(raw, "save_weights_for_sampler", body).json()
    assert post(raw, f"sessions/{id}/finish", END).status_code == 204
    assert "has ended" in result(raw, promise)["error"]
    until(lambda: not tinker.models.folders.path(folders[0]).exists())


def test_a_name_that_expired_is_free_and_its_files_go(raw, served):
    model = model_of(raw)
    tinker = served.service.part(Tinker)

    def save(seq):
        body = {"model_id": model, "seq_id": seq, "path": "a", "ttl_seconds": 3600}
        path = result(raw, post(raw, "save_weights", body).json())["path"]
        found = tinker.store.database.read(
            lambda one: find_checkpoint(one, path, "default", 0)
        ).result()
        return found.folder

    first = save(1)
    tinker.store.database.write(
        lambda one: one.execute("UPDATE tinker_checkpoints SET expires_s = 1").rowcount
    ).result()
    second = save(2)
    assert tinker.models.folders.path(second).exists()
    until(lambda: not tinker.models.folders.path(first).exists())


def test_links_of_a_tenant_end_no_others_and_count_as_its_own(tmp_path):
    links = Links(LINKS)
    first = links.make("a", tmp_path / "a")
    for _ in range(MOST_LINKS + 1):
        links.make("b", tmp_path / "b")
    assert links.owner(first) == "a"
    assert len(links._links) == MOST_LINKS + 1
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    keys, _ = open_keys(("key-for-tests",), None)
    guard = Authentication(app, keys, (), links.owner)
    asyncio.run(guard({"type": "http", "path": first}, None, None))
    assert seen[0]["state"]["caller"] == Caller("links of a", "a", frozenset())
    links._links[first] = replace(links._links[first], until_s=0.0)
    assert links.owner(first) is None

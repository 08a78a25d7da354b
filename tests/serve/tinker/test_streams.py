"""The stream of a model by the bare protocol: order, duplicates, gaps, restarts and kills."""

import asyncio
import random
import shutil

import httpx2
import pytest
import zstandard

from pcg.serve.http.errors import ApiError
from pcg.serve.tinker import streams
from pcg.serve.tinker.tinker import Tinker
from tests.support import serving, tinker_client, trainer_data
from tests.support.server_process import running
from tests.support.tinker_client import model_of, new_model, new_session, result
from tests.support.waiting import until

ADAM = {"learning_rate": 1e-2, "eps": 1e-8}
ROWS = trainer_data.sampled()


def tensor(values, dtype="float32"):
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


def passed(model, seq, field="forward_backward_input"):
    """A body of forward_backward, as clients sent it before protobuf."""
    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": row["tokens"]}]},
            "loss_fn_inputs": {
                "target_tokens": tensor([max(0, one) for one in row["targets"]], "int64"),
                "weights": tensor(row["weights"]),
            },
        }
        for row in ROWS
    ]
    return {"model_id": model, "seq_id": seq, field: {"data": data, "loss_fn": "cross_entropy"}}


def step(model, seq):
    return {"model_id": model, "seq_id": seq, "adam_params": ADAM, "type": "optim_step"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with tinker_client.server(tmp_path_factory.mktemp("data"), tinker_client.load) as server:
        yield server


@pytest.fixture
def raw(served):
    with tinker_client.raw(served.url) as client:
        yield client


def made(raw):
    return model_of(raw, rank=4)


def post(raw, path, body):
    reply = raw.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found


def test_order_and_duplicates_change_nothing(raw):
    model, other = made(raw), made(raw)
    asked = {}
    last = post(raw, "forward", passed(model, 4, "forward_input"))
    asked[3] = post(raw, "optim_step", step(model, 3))
    asked[2] = post(raw, "forward_backward", passed(model, 2))
    asked[1] = post(raw, "forward_backward", passed(model, 1))
    shuffled = [result(raw, one) for one in (asked[1], asked[2], asked[3], last)]
    for again, path, body in (
        (asked[1], "forward_backward", passed(model, 1)),
        (asked[3], "optim_step", step(model, 3)),
    ):
        assert post(raw, path, body) == again
        assert post(raw, path, body) == again
    straight = [
        result(raw, post(raw, "forward_backward", passed(other, 1))),
        result(raw, post(raw, "forward_backward", passed(other, 2))),
        result(raw, post(raw, "optim_step", step(other, 3))),
        result(raw, post(raw, "forward", passed(other, 4, "forward_input"))),
    ]
    assert shuffled == straight
    assert straight[0]["metrics"]["loss:sum"] != straight[3]["metrics"]["loss:sum"]
    assert (
        result(raw, post(raw, "optim_step", step(model, 5)))["category"] == "user"
    )  # no gradients


def test_what_comes_behind_a_gap_fails(raw, monkeypatch):
    monkeypatch.setattr(streams, "GAP_S", 0.05)
    model = made(raw)
    late = post(raw, "optim_step", step(model, 3))
    said = result(raw, late)
    assert said["category"] == "user"
    assert "request 1 of" in said["error"]
    monkeypatch.setattr(streams, "GAP_S", 60.0)
    assert result(raw, post(raw, "forward_backward", passed(model, 1)))["metrics"]
    assert result(raw, post(raw, "optim_step", step(model, 2)))["metrics"]
    # The third has failed, and the fourth is next.
    assert result(raw, post(raw, "forward_backward", passed(model, 4)))["metrics"]
    assert raw.post("optim_step", json=step(model, 100_000)).status_code == 400


def test_what_cannot_be_is_refused_and_changes_nothing(raw, served):
    session = new_session(raw)
    first, second = new_model(raw, session).json(), new_model(raw, session).json()
    assert first == second
    model = first["model_id"]
    assert new_model(raw, session, 1, rank=100_000).status_code == 400
    assert new_model(raw, "ses-none", 1).status_code == 410
    assert raw.post("optim_step", json=step("no:train:0", 1)).status_code == 404
    assert raw.post("optim_step", json={**step(model, 1), "x": 1}).status_code == 400
    assert raw.post("optim_step", json=step(model, 0)).status_code == 400
    bare = {"content-type": "application/x-protobuf"}
    assert raw.post("forward_backward", content=b"\xff" * 9, headers=bare).status_code == 400
    gzip = {**bare, "content-encoding": "gzip"}
    assert raw.post("forward_backward", content=b"", headers=gzip).status_code == 415
    packed = {**bare, "content-encoding": "zstd"}
    bomb = zstandard.ZstdCompressor().compress(bytes(2**24))
    streamed = zstandard.ZstdCompressor().compressobj()
    for content, said in (
        (b"plain", "cannot be decompressed"),
        (bomb, "at most 4194304"),
        (streamed.compress(bytes(2**20)) + streamed.flush(), "declares no size"),
        (zstandard.ZstdCompressor().compress(bytes(2**20))[:-1], "cannot be decompressed"),
        (zstandard.ZstdCompressor().compress(b"a") + b"a", "cannot be decompressed"),
        (zstandard.ZstdCompressor().compress(b"plain"), "not a protobuf ForwardBackwardRequest"),
    ):
        reply = raw.post("forward_backward", content=content, headers=packed)
        assert (reply.status_code, said in reply.text) == (400, True), reply.text
    assert raw.post("forward_backward", json={"model_id": model}).status_code == 400
    for place, (token, name) in enumerate(((10_000, "target_tokens"), (1, "no_such"))):
        body = passed(model, place + 1)
        body["forward_backward_input"]["data"][0]["loss_fn_inputs"][name] = tensor(
            [token] * len(ROWS[0]["tokens"]), "int64"
        )
        assert result(raw, post(raw, "forward_backward", body))["category"] == "user"
    escape = {"model_id": model, "seq_id": 3, "path": "../../a"}
    assert "cannot name" in result(raw, post(raw, "save_weights", escape))["error"]
    assert result(raw, post(raw, "forward_backward", passed(model, 4)))["metrics"]
    saved = result(raw, post(raw, "save_weights", {"model_id": model, "seq_id": 5, "path": "a"}))
    inflight = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0, "kind": "inflight"}
    assert raw.post("save_weights_for_sampler", json=inflight).status_code == 400
    # What another tenant has is not there.
    models, loop = served.service.part(Tinker).models, served.server._loop
    assert loop is not None
    for asked in (
        models.find("other", model),
        models.ask("other", model, 6, "optim_step", b"{}"),
        models.checkpoint("other", saved["path"]),
    ):
        with pytest.raises(ApiError, match="here is no"):
            asyncio.run_coroutine_threadsafe(asked, loop).result(60)
    end = {"reason": {"type": "success"}}
    raw.post(f"sessions/{session}/finish", json=end)
    until(lambda: raw.post("optim_step", json=step(model, 6)).status_code == 410)
    database = served.service.part(Tinker).store.database

    def kept(connection):
        rows = connection.execute(
            "SELECT status, state, (SELECT COUNT(request) FROM tinker_futures WHERE stream = id) "
            "FROM tinker_models WHERE id = ?",
            (model,),
        )
        return list(rows.fetchone())

    until(lambda: database.read(kept).result() == ["closed", None, 0])
    assert post(raw, "retrieve_future", {"request_id": first["request_id"]})["model_id"] == model


def test_what_ended_long_ago_is_forgotten(served, raw, monkeypatch):
    tinker, loop = served.service.part(Tinker), served.server._loop
    assert loop is not None

    def rows(session):
        def read(connection):
            return {
                name: connection.execute(
                    f"SELECT COUNT(*) FROM tinker_{name} "
                    f"WHERE {'id' if name == 'sessions' else 'session'} = ?",
                    (session,),
                ).fetchone()[0]
                for name in ("sessions", "models", "samplers", "futures")
            }

        return tinker.store.database.read(read).result()

    def forget(keep_s):
        monkeypatch.setattr(tinker, "_keep_s", keep_s)
        asyncio.run_coroutine_threadsafe(tinker._forget(), loop).result(60)

    kept, gone, still = (made(raw) for _ in range(3))
    sessions = [model.partition(":")[0] for model in (kept, gone, still)]
    saved = post(raw, "save_weights", {"model_id": kept, "seq_id": 1, "path": "a"})
    assert result(raw, saved)["path"].endswith("/weights/a")
    for place, session in enumerate(sessions):
        opened = {"session_id": session, "sampling_session_seq_id": 0}
        post(raw, "create_sampling_session", {**opened, "base_model": tinker_client.MODEL})
        if place < 2:
            raw.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
    closed = "SELECT COUNT(*) FROM tinker_models WHERE status = 'closed' AND id IN (?, ?)"
    until(
        lambda: tinker.store.database.read(
            lambda one: one.execute(closed, (kept, gone)).fetchone()[0] == 2
        ).result()
    )
    whole = {"sessions": 1, "models": 1, "samplers": 1, "futures": 1}
    forget(3600.0)  # none of them ended so long ago
    assert rows(sessions[1]) == whole
    forget(-3600.0)
    assert rows(sessions[0]) == {"sessions": 1, "models": 1, "samplers": 0, "futures": 0}
    assert rows(sessions[1]) == dict.fromkeys(whole, 0)
    assert rows(sessions[2]) == whole  # it is open
    assert raw.get(f"training_runs/{kept}/checkpoints").json()["checkpoints"]
    raw.delete(f"training_runs/{kept}/checkpoints/weights/a")
    monkeypatch.setattr("pcg.serve.tinker.sessions.MOST_ENDED", 0)
    forget(3600.0)  # by their number
    assert rows(sessions[0]) == dict.fromkeys(whole, 0)


@pytest.mark.slow
@pytest.mark.parametrize("state_steps", [1, 16])
def test_a_crash_loses_nothing(tmp_path, monkeypatch, state_steps):
    """A copy of the data folder is what a killed server leaves."""
    monkeypatch.setattr(streams, "STATE_STEPS", state_steps)
    with (
        tinker_client.server(tmp_path / "first", tinker_client.load) as served,
        tinker_client.raw(served.url) as raw,
    ):
        model = made(raw)
        asked = [
            post(raw, "forward_backward", passed(model, 1)),
            post(raw, "optim_step", step(model, 2)),
            post(raw, "forward_backward", passed(model, 3)),
        ]
        before = [result(raw, one) for one in asked]
        held = post(raw, "forward", passed(model, 5, "forward_input"))
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        stepped = result(raw, post(raw, "optim_step", step(model, 4)))
        scored = result(raw, held)
    (tmp_path / "second" / "tinker" / "left-by-a-crash").mkdir()
    with (
        tinker_client.server(tmp_path / "second", tinker_client.load) as served,
        tinker_client.raw(served.url) as raw,
    ):
        assert [result(raw, one) for one in asked] == before
        assert post(raw, "forward_backward", passed(model, 3)) == asked[2]
        assert result(raw, post(raw, "optim_step", step(model, 4))) == stepped
        assert result(raw, held) == scored
        assert not (tmp_path / "second" / "tinker" / "left-by-a-crash").exists()


UPDATES = 24


def row_of(model, seq):
    tokens = [(seq * 7 + i) % 50 + 1 for i in range(12)]
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [11]},
            "weights": {"data": [1.0] * 11, "dtype": "float32", "shape": [11]},
        },
    }
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq, "forward_backward_input": asked}


def ask(raw, model, update):
    """Ask for an update; returns its two promises."""
    step = {"model_id": model, "seq_id": 2 * update + 2, "adam_params": {"learning_rate": 1e-2}}
    asked = (("forward_backward", row_of(model, 2 * update + 1)), ("optim_step", step))
    return [raw.post(path, json=body).raise_for_status().json() for path, body in asked]


def client_of(server):
    headers = {"x-api-key": serving.KEY}
    return httpx2.Client(base_url=f"{server.url}/tinker/api/v1/", headers=headers, timeout=60)


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(tmp_path):
    chance = random.Random(0)
    own = ["--data-dir", str(tmp_path)]
    promises = []
    results = {}
    model, is_over, kills = "", False, 0
    while not is_over:
        with running(*own) as server, client_of(server) as raw:
            model = model or made(raw)
            for promise in promises:  # all that was acknowledged is there, as it was
                found = tinker_client.result(raw, promise)
                assert results.setdefault(promise["request_id"], found) == found
            until = min(UPDATES, len(promises) // 2 + chance.randint(5, 9))
            for update in range(len(promises) // 2, until):
                promises += ask(raw, model, update)
                if chance.random() < 0.6:
                    last = promises[-1]
                    results[last["request_id"]] = tinker_client.result(raw, last)
            is_over = len(promises) == 2 * UPDATES
            if not is_over:
                server.process.kill()
                server.process.wait(60)
                kills += 1
                continue
            there = [tinker_client.result(raw, one) for one in promises]
            again = made(raw)
            straight = [
                tinker_client.result(raw, one)
                for update in range(UPDATES)
                for one in ask(raw, again, update)
            ]
    assert kills > 1
    for ours, expected in zip(there, straight, strict=True):
        assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)

"""Sessions of the real tinker client, and futures by the bare protocol."""

import asyncio

import pytest
import tinker

from pcg.serve.http.errors import ApiError
from pcg.serve.store.store import open_store
from pcg.serve.tinker import futures as futures_module
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.records import JSON, ROW_BYTES, forget_requests
from pcg.serve.tinker.tinker import Tinker
from tests.support import serving, tinker_client


def test_the_client_opens_a_session_and_learns_what_there_is(tmp_path):
    with tinker_client.server(tmp_path) as served:
        with tinker_client.client(served.url) as client:
            session = client.holder.get_session_id()
        with tinker_client.raw(served.url) as raw:
            (model,) = raw.get("get_server_capabilities").json()["supported_models"]
            assert model["model_name"] == tinker_client.MODEL
            assert model["max_context_length"] == served.service.max_model_len
            assert raw.get("healthz").json() == {"status": "ok"}
            beat = {"session_id": session}
            assert raw.post("session_heartbeat", json=beat).status_code == 200
            loop, sessions = served.server._loop, served.service.part(Tinker).sessions
            assert loop is not None
            sessions._life_s = -1.0  # whatever beats has done so too long ago
            asyncio.run_coroutine_threadsafe(sessions.expire(), loop).result(60)
            assert raw.post("session_heartbeat", json=beat).status_code == 410


def test_a_session_is_its_tenants_own_and_ends_once(tmp_path):
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        made = raw.post("create_session", json={"tags": ["a"], "user_metadata": None}).json()
        beat = {"session_id": made["session_id"]}
        assert raw.post("session_heartbeat", json=beat).json()["type"] == "session_heartbeat"
        end = {"reason": {"type": "errored"}}
        assert raw.post(f"sessions/{made['session_id']}/finish", json=end).status_code == 204
        assert raw.post(f"sessions/{made['session_id']}/finish", json=end).status_code == 204
        assert raw.post("session_heartbeat", json=beat).status_code == 410
        assert raw.post("sessions/ses-none/finish", json=end).status_code == 404
        assert raw.post("retrieve_future", json={"request_id": "req-none"}).status_code == 410
        huge = {"tags": [], "user_metadata": {"a": "b" * 20_000}}
        assert raw.post("create_session", json=huge).status_code == 400
        with pytest.raises(ApiError):
            served.service.part(Tinker).sessions.beat("other", made["session_id"])


def test_without_a_data_folder_it_is_refused_by_name():
    with (
        serving.on_a_port(api_key=(tinker_client.KEY,)) as served,
        pytest.raises(tinker.BadRequestError, match="--data-dir"),
    ):
        _ = tinker.ServiceClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY).holder


def test_a_tenant_has_a_bound_of_futures(tmp_path, monkeypatch):
    monkeypatch.setattr(futures_module, "MOST_PENDING", 2)
    monkeypatch.setattr(futures_module, "MOST_BYTES", 4 * ROW_BYTES)

    async def act():
        futures = Futures(store)
        made = [await futures.promise("t", "s", "m", seq, "k", b"") for seq in (1, 2)]
        with pytest.raises(ApiError, match="wait already"):
            await futures.promise("t", "s", "m", 3, "k", b"")
        await futures.promise("other", "s", "n", 1, "k", b"")
        await futures.resolve(made[0][0], b"", JSON)
        with pytest.raises(ApiError, match="bytes"):
            await futures.promise("t", "s", "m", 3, "k", b"a" * 2 * ROW_BYTES)
        with pytest.raises(ApiError, match="bytes"):  # what a client is told is kept, too
            await futures.promise("t", "s", "m", 3, "k", b"", {"a": "a" * 2 * ROW_BYTES})
        await store.write(forget_requests, "m", 0, 9)
        counted = futures._bytes["t"]
        futures._bytes["t"] += 1000
        await futures.expire()
        assert futures._bytes["t"] == counted + 1000  # all rows are counted now and then alone
        futures._count_s = 0.0
        await futures.expire()
        assert futures._bytes["t"] == counted

    with open_store(tmp_path) as store:
        asyncio.run(act())

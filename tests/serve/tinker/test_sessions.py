"""Sessions of the real tinker client, and futures by the bare protocol."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import tinker

from pcg.errors import FinetuneError
from pcg.serve.http.errors import ApiError
from pcg.serve.store.store import open_store
from pcg.serve.tinker import futures as futures_module
from pcg.serve.tinker import records
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.operations import UNLOAD, Outcome, settle_row
from pcg.serve.tinker.records import (
    DONE,
    FAILED,
    JSON,
    MODELS,
    PENDING,
    ROW_BYTES,
    SAMPLERS,
    SESSIONS,
    LossRecord,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    forget_requests,
    insert_loss,
)
from pcg.serve.tinker.sessions import Sessions
from pcg.serve.tinker.tinker import Tinker
from pcg.serve.tinker.wire import SessionBody
from tests.support import serving, tinker_client


def test_the_client_opens_a_session_and_learns_what_there_is(tmp_path: Path) -> None:
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


def test_a_session_is_its_tenants_own_and_ends_once(tmp_path: Path) -> None:
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


def test_without_a_data_folder_it_is_refused_by_name() -> None:
    with (
        serving.on_a_port(api_key=(tinker_client.KEY,)) as served,
        pytest.raises(tinker.BadRequestError, match="--data-dir"),
    ):
        _ = tinker.ServiceClient(base_url=f"{served.url}/tinker", api_key=tinker_client.KEY).holder


def test_futures_outlast_their_server_and_are_made_once(tmp_path: Path) -> None:
    async def first() -> tuple[str, str, str]:
        futures = Futures(store)
        one, is_new = await futures.promise("t", "s", "m", 1, "optim_step", b"{}", {"a": 1})
        assert is_new
        again, is_new = await futures.promise("t", "s", "m", 1, "optim_step", b"other")
        assert again == one
        assert not is_new
        two, _ = await futures.promise("t", "s", "m", 2, "optim_step", b"{}")
        three, _ = await futures.promise("t", "s", "m", 3, "optim_step", b"{}")
        waiting = asyncio.create_task(futures.retrieve("t", one.id, 60))
        others = asyncio.create_task(futures.retrieve("t", one.id, 60))
        await asyncio.sleep(0)
        await futures.resolve(one, b"[1]", JSON)
        await futures.resolve(one, b"[2]", JSON)  # the first result holds
        assert (await waiting).result == (await others).result == b"[1]"
        await futures.fail_by(two, FinetuneError("no"))
        assert not futures._waiting
        return one.id, two.id, three.id

    async def second(ids: tuple[str, str, str]) -> None:
        futures = Futures(store)
        found = [await futures.retrieve("t", id, 0) for id in ids]
        assert [one.state for one in found] == [DONE, FAILED, PENDING]
        assert [one.result for one in found] == [b"[1]", b"no", None]
        assert found[1].category == "user"
        with pytest.raises(ApiError, match="no request"):
            await futures.retrieve("other", ids[0], 0)

    with open_store(tmp_path) as store:
        ids = asyncio.run(first())
    with open_store(tmp_path) as store:
        asyncio.run(second(ids))


def test_a_tenant_has_a_bound_of_futures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "MOST_PENDING", 2)
    monkeypatch.setattr(futures_module, "MOST_BYTES", 4 * ROW_BYTES)

    async def act() -> None:
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


def test_what_ended_has_ended_after_a_crash(tmp_path: Path) -> None:
    """A model with its last result, and weights for sampling with their session."""
    model = ModelRecord("m", "t", "ended", 0, "tiny", "{}", None, 0, 0, state="tinker/state")

    async def act(futures: Futures) -> None:
        asked, _ = await futures.promise("t", "ended", "m", 3, UNLOAD, b"{}")
        await store.write(MODELS.insert, model)
        await futures.resolve(asked, b"{}", JSON, settle_row(model, asked, Outcome(b"{}")))
        found = await store.read(MODELS.find, id="m", tenant="t")
        assert found is not None
        assert (found.status, found.state, found.done_seq) == ("closed", None, 3)
        for session, status in (("ended", "success"), ("lives", "open")):
            made = SessionRecord(session, "t", 0, status, "[]", None, None, "")
            await store.write(SESSIONS.insert, made)
            for path, folder in ((None, f"tinker/{session}"), ("tinker://m", "tinker/saved")):
                key = f"{session} {path}"
                row = SamplerRecord(key, "t", session, len(key), "tiny", path, folder, 0)
                await store.write(SAMPLERS.insert, row)
        await store.write(records.end_left)
        rows = await store.read(SAMPLERS.read, "id")
        assert {id for (id,) in rows} == {"ended tinker://m", "lives None", "lives tinker://m"}

    with open_store(tmp_path) as store:
        asyncio.run(act(Futures(store)))


def test_losses_of_sessions_that_ended_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(records.MOST_LOSSES, "tenant", 1)

    async def act() -> None:
        found = Sessions(store, 600.0)
        for number in range(3):
            one = await found.create("t", SessionBody())
            made = LossRecord(f"loss-{number}", "t", one.id, 0, "{}", 0)
            await store.write(insert_loss, made)
            await found.finish("t", one.id, "success")

    with open_store(tmp_path) as store:
        asyncio.run(act())


def test_a_session_that_beats_while_others_end_lives(tmp_path: Path) -> None:
    async def act() -> None:
        found = Sessions(store, -1.0)
        made = [await found.create("t", SessionBody()) for _ in range(2)]

        async def beat(ended: SessionRecord) -> None:
            found._life_s = 600.0
            found._open = {one.id: (one, time.monotonic() + 600) for one in made[1:]}

        found.on_end.append(beat)
        await found.expire()
        assert [found.is_open(one.id) for one in made] == [False, True]

    with open_store(tmp_path) as store:
        asyncio.run(act())

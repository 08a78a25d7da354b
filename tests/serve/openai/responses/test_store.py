"""Responses that are kept: within bounds, and each tenant's its own."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from pcg.keys import Keys
from pcg.serve.openai import responses
from pcg.serve.openai.messages import Message
from pcg.serve.openai.response_items import (
    InputItem,
    KeptResponse,
    ResponseStore,
    memory_of,
    messages_of,
)
from tests.support import serving


def kept(size: int) -> KeptResponse:
    return KeptResponse(b"x" * size, (), (), 0)


def test_the_least_recently_read_goes_first() -> None:
    store = ResponseStore(most=3, most_bytes=1000)
    for name in "abc":
        store.put("one", name, kept(10))
    store.put("two", "z", kept(10))
    assert store.find("one", "a") is not None
    store.put("one", "d", kept(10))
    assert store.find("one", "b") is None
    assert store.find("one", "a") is not None
    store.put("one", "e", kept(995))
    assert [name for name in "acde" if store.find("one", name)] == ["e"]
    assert store.find("two", "z") is not None
    assert store.delete("one", "e")
    assert not store.delete("one", "e")
    store.put("one", "f", kept(1000))
    assert store.find("one", "f") is not None
    assert not store.may_keep(1001)


def test_empty_parts_count_by_their_memory() -> None:
    item = InputItem.model_validate(
        {"role": "user", "content": [{"type": "text", "text": ""}] * 99}
    )
    tracemalloc.start()
    try:
        copies = [item.model_copy(deep=True) for _ in range(20)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 2 < memory_of(copies) < taken * 4


def test_a_history_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 100 bytes may go on from thousands of items."""
    threads: list[threading.Thread] = []

    def reading(items: Iterable[InputItem]) -> list[Message]:
        threads.append(threading.current_thread())
        return messages_of(items)

    monkeypatch.setattr(responses, "messages_of", reading)

    async def run() -> None:
        with serving.service_of() as service:
            body = {"model": serving.MODEL, "input": "a", "max_output_tokens": 2}
            async with serving.client_of(service) as client:
                assert (await client.post("/v1/responses", json=body)).is_success

    asyncio.run(run())
    assert threads
    assert threading.current_thread() not in threads


def test_nobody_elses_response_is_there() -> None:
    keys = Keys([serving.key("ann"), serving.key("ben"), serving.key("ann-2", tenant="ann")])

    async def run() -> None:
        with serving.service_of(keys=keys) as service:
            body = {"model": serving.MODEL, "input": "a", "max_output_tokens": 2}
            async with serving.client_of(service, serving.headers_of("ann")) as client:
                reply = (await client.post("/v1/responses", json=body)).json()
                path = f"/v1/responses/{reply['id']}"
                assert (await client.get(path)).json() == reply
            async with serving.client_of(service, serving.headers_of("ben")) as client:
                await refused(client, path, body, reply["id"])
            async with serving.client_of(service, serving.headers_of("ann-2")) as client:
                assert (await client.get(path)).json() == reply
                assert (await client.delete(path)).json()["deleted"] is True

    asyncio.run(run())


async def refused(client: Any, path: str, body: dict[str, Any], kept_id: str) -> None:
    """Every door says the same of another tenant's response as of none at all."""
    other = path[:-4] + "0000"
    for suffix in ("", "/input_items"):
        theirs, nobodys = await client.get(path + suffix), await client.get(other + suffix)
        assert theirs.status_code == nobodys.status_code == 404
        said = theirs.json()["error"]["message"].replace(path[-4:], "0000")
        assert said == nobodys.json()["error"]["message"]
    assert (await client.delete(path)).status_code == 404
    asked = {**body, "previous_response_id": kept_id}
    assert (await client.post("/v1/responses", json=asked)).status_code == 400

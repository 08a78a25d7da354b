"""Long bodies: validated beside the event loop, with the replies and errors of short ones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pcg.serve.http import service as long_body
from pcg.serve.http.service import Service
from tests.support import serving

JSON = {**serving.HEADERS, "content-type": "application/json"}
PADDING = "x" * long_body.LONG_BYTES
USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "a", "max_tokens": 3, "temperature": 0}, "choices"),
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 3, "temperature": 0}, "choices"),
    "/v1/responses": ({"input": "a", "max_output_tokens": 3, "temperature": 0}, "usage"),
    "/v1/embeddings": ({"input": "a"}, "data"),
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving.service_of() as service:
        yield service


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that long bodies were validated on."""
    found: list[str] = []
    validated = long_body.validated

    def noted(field: Any, body: bytes) -> Any:
        found.append(threading.current_thread().name)
        return validated(field, body)

    monkeypatch.setattr(long_body, "validated", noted)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_replies_are_those_of_short_bodies(service: Service, threads: list[str], path: str) -> None:
    body, part = BODIES[path]
    short = serving.post(service, path, {**body, "user": "x"}).json()
    assert threads == []
    long = serving.post(service, path, {**body, "user": PADDING}).json()
    assert long[part] == short[part]
    assert [name.startswith("pcg serve") for name in threads] == [True]


def test_texts_and_chats_are_tokenized(service: Service, threads: list[str]) -> None:
    for body in ({"prompt": PADDING}, {"messages": [{"role": "user", "content": PADDING}]}):
        assert serving.post(service, "/tokenize", body).json()["count"] > 1000
    assert len(threads) == 2


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"prompt": "a", "user": PADDING, "x": 1}),
        json.dumps({"prompt": "a", "user": PADDING, "n": 0}),
        json.dumps({"prompt": [1] * 40_000 + ["a"]}),
        json.dumps({"user": PADDING}),
        json.dumps([PADDING]),
        f'{{"prompt": "a", "user": "{PADDING}',
        "[" * 60_000 + PADDING,
        b'{"prompt": "\xff' + PADDING.encode() + b'"}',
    ],
)
def test_errors_are_those_of_short_bodies(
    service: Service, threads: list[str], monkeypatch: pytest.MonkeyPatch, content: str | bytes
) -> None:
    async def send() -> Any:
        async with serving.client_of(service, JSON) as client:
            reply = await client.post("/v1/completions", content=content)
            assert reply.status_code == 400
            return reply.json()["error"]

    found = asyncio.run(send())
    assert len(threads) == 1
    monkeypatch.setattr(long_body, "LONG_BYTES", 2**30)
    assert asyncio.run(send()) == found
    assert len(threads) == 1


def test_others_go_on_meanwhile(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, is_there = threading.Event(), threading.Event()
    validated = long_body.validated

    def waiting(field: Any, body: bytes) -> Any:
        is_there.set()
        assert gate.wait(60)
        return validated(field, body)

    monkeypatch.setattr(long_body, "validated", waiting)

    async def send() -> tuple[int, int]:
        async with serving.client_of(service) as client:
            body = {"prompt": "a", "max_tokens": 2}
            long = asyncio.create_task(
                client.post("/v1/completions", json={**body, "user": PADDING})
            )
            while not is_there.is_set():
                await asyncio.sleep(0.005)
            short = await client.post("/v1/completions", json=body)
            assert not long.done()
            gate.set()
            return short.status_code, (await long).status_code

    assert asyncio.run(send()) == (200, 200)

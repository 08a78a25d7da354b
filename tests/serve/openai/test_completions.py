"""/v1/completions over ASGI: the library's own text, tokens and logprobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pcg.serve.service import Service
from tests.support import serving


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving.service_of(serving.make_executor(adapters=2)) as service:
        yield service


def ask(service: Service, body: dict[str, Any], status: int = 200) -> Any:
    async def post() -> Any:
        async with serving.client_of(service) as client:
            reply = await client.post("/v1/completions", json={"model": serving.MODEL, **body})
            assert reply.status_code == status, reply.text
            return reply.json()

    return asyncio.run(post())


def stream(service: Service, body: dict[str, Any]) -> list[dict[str, Any]]:
    async def post() -> list[str]:
        async with serving.client_of(service) as client:
            asked = {"model": serving.MODEL, "stream": True, **body}
            reply = await client.post("/v1/completions", json=asked)
            assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
            return reply.text.split("\n\n")

    *events, done, end = asyncio.run(post())
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


PROMPTS = ["Hello, how", "the quick brown fox"]


@pytest.mark.parametrize("model", [serving.MODEL, "lora-0", "lora-1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_librarys(service: Service, model: str, temperature: float) -> None:
    sampling = {"temperature": temperature, "seed": 11, "n": 2}
    adapter = None if model == serving.MODEL else model
    expected = service.executor.generate(PROMPTS, adapter, max_new_tokens=12, **sampling)
    body = {"model": model, "prompt": PROMPTS, "max_tokens": 12, **sampling}
    found = ask(service, body)["choices"]
    assert [choice["text"] for choice in found] == [one.text for one in expected]
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    streamed: dict[int, str] = dict.fromkeys(range(4), "")
    for event in stream(service, body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [one.text for one in expected]


def test_usage_of_a_stream_comes_last(service: Service) -> None:
    body = {"prompt": "Hello, how", "max_tokens": 3, "ignore_eos": True}
    events = stream(service, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])
    usage = ask(service, body)["usage"]
    assert usage["completion_tokens"] == 3
    assert events[-1]["usage"]["total_tokens"] == usage["total_tokens"]
    assert all("usage" not in event for event in stream(service, body))


def test_unknown_models_and_fields(service: Service) -> None:
    error = ask(service, {"model": "other", "prompt": "a"}, 404)["error"]
    assert error["message"] == "The model `other` does not exist."
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = ask(service, {"prompt": "a", "maxtokens": 3}, 400)["error"]
    assert error["message"] == "Unrecognized request argument supplied: maxtokens"

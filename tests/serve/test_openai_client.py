"""The openai client over loopback: errors by class, retries, timeouts, many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support import serving
from tests.support.step_gate import StepGate
from tests.support.waiting import until

LONG: dict[str, Any] = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
GREEDY = {"temperature": 0, **LONG}
PROMPTS = ["Hello, how", "the quick brown fox", "def add(a, b):", "Ein schöner Tag"]


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Served]:
    with serving.on_a_port(lambda: serving.make_executor(adapters=2)) as server:
        yield server


def client_of(server: serving.Served, key: str = serving.KEY, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **options)


@pytest.fixture(scope="module")
def client(server: serving.Served) -> Iterator[openai.OpenAI]:
    with client_of(server, max_retries=0) as client:
        yield client


def test_errors_are_the_clients_classes(server: serving.Served, client: openai.OpenAI) -> None:
    with client_of(server, "a-wrong-key", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key") as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"
        assert refused.value.request_id
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist") as missing:
        client.completions.create(model="nobody", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as bad:
        client.completions.create(model=serving.MODEL, prompt="a", max_tokens=10_000)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: x"):
        client.completions.create(model=serving.MODEL, prompt="a", extra_body={"x": 1})


def test_models_are_the_base_and_its_adapters(client: openai.OpenAI) -> None:
    found = list(client.models.list())
    assert [model.id for model in found] == [serving.MODEL, "lora-0", "lora-1"]
    assert client.models.retrieve("lora-1").id == "lora-1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_full_queue_is_asked_again_after_the_time_that_the_server_says() -> None:
    with (
        serving.on_a_port(max_num_seqs=1, tenant_queue=1) as server,
        client_of(server, max_retries=0) as hasty,
        client_of(server, max_retries=5) as patient,
    ):
        gate = StepGate(server.service.client.engine.engine)
        gate.let(8)  # the text of a first token may wait for the next
        asked = {
            "model": serving.MODEL,
            "prompt": "Hello",
            "stream": True,
            "temperature": 0,
            **LONG,
        }
        running = hasty.completions.create(**asked)
        next(running)
        waiting = threading.Thread(target=lambda: list(hasty.completions.create(**asked)))
        waiting.start()
        numbers = server.service.client.engine.numbers
        until(lambda: numbers().waiting == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            hasty.completions.create(model=serving.MODEL, prompt="a")
        assert float(refused.value.response.headers["retry-after"]) >= 1

        def go_on() -> None:
            totals = numbers().totals
            until(lambda: totals.turned_away + totals.requests["refused"] == 2)
            gate.open()

        going_on = threading.Thread(target=go_on)
        going_on.start()
        raw = patient.completions.with_raw_response.create(model=serving.MODEL, prompt="a")
        assert raw.retries_taken >= 1
        assert raw.parse().choices[0].finish_reason
        going_on.join()
        waiting.join()
        running.close()


def test_a_timeout_ends_the_request(server: serving.Served) -> None:
    numbers = server.service.client.engine.numbers
    with (
        client_of(server, max_retries=0, timeout=0.05) as hasty,
        pytest.raises(openai.APITimeoutError),
    ):
        hasty.completions.create(model=serving.MODEL, prompt=PROMPTS * 8, n=2, **LONG)
    until(lambda: not numbers().running + numbers().waiting)


def test_many_at_once_get_their_own_texts(server: serving.Served) -> None:
    names = [serving.MODEL, "lora-0", "lora-1"]
    asked = [(PROMPTS[i % 4], names[i % 3]) for i in range(24)]
    adapters = [None if name == serving.MODEL else name for _, name in asked]
    texts = [prompt for prompt, _ in asked]
    expected = server.service.client.executor.generate(texts, adapters, max_new_tokens=16)

    async def ask_all() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=serving.KEY, max_retries=0
        ) as client:

            async def ask(prompt: str, model: str) -> tuple[str, str]:
                common: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 16}
                parts = await client.completions.create(**common, temperature=0, stream=True)
                streamed = "".join([part.choices[0].text async for part in parts])
                whole = await client.completions.create(**common, temperature=0)
                return streamed, whole.choices[0].text

            return await asyncio.gather(*(ask(prompt, model) for prompt, model in asked))

    found = asyncio.run(ask_all())
    assert found == [(one.text, one.text) for one in expected]

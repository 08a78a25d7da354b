"""Clients over loopback: many at once get the library's texts, and are told when to come again."""

import asyncio
import threading

import openai
import pytest
import torch

from tests.support import serving
from tests.support.step_gate import StepGate
from tests.support.waiting import until

RECIPES = {
    "lora": {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"},
    "dora": {"peft_type": "LORA", "r": 8, "target_modules": "all-linear", "use_dora": True},
    "ia3": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
}
NAMES = [f"{method}-{index}" for method in RECIPES for index in range(2)]
PROMPTS = ["Hello, how are", "the quick brown", "def add(a, b):"]
TOKENS = 16


def make_executor():
    executor = serving.make_executor(adapters=0)
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        adapter = executor.add_adapter(name, RECIPES[name.partition("-")[0]])
        for tensor in adapter.tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
        executor.refresh_adapter(name)
    return executor


@pytest.fixture(scope="module")
def server():
    with serving.on_a_port(make_executor) as server:
        yield server


async def texts(server, fields, stream):
    """The texts of every prompt under every model, all of them asked at once."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=serving.KEY, max_retries=0
    ) as client:

        async def ask(model, prompt):
            body = {"model": model, "prompt": prompt, "max_tokens": TOKENS}
            if not stream:
                return (await client.completions.create(**body, **fields)).choices[0].text
            parts = await client.completions.create(**body, **fields, stream=True)
            return "".join([part.choices[0].text async for part in parts])

        models = [serving.MODEL, *NAMES]
        return await asyncio.gather(*(ask(model, p) for model in models for p in PROMPTS))


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}]
)
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_texts_are_the_librarys(server, fields, stream):
    found = asyncio.run(texts(server, fields, stream))
    alone = [
        server.service.client.executor.generate(prompt, adapter, max_new_tokens=TOKENS, **fields)
        for adapter in (None, *NAMES)
        for prompt in PROMPTS
    ]
    assert found == [one.text for one in alone]
    of_adapters = [tuple(found[i : i + len(PROMPTS)]) for i in range(0, len(found), len(PROMPTS))]
    assert len(set(of_adapters)) == 1 + len(NAMES)  # each answers in its own way


LONG = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
TEXTS = ["Hello, how", "the quick brown fox", "def add(a, b):", "Ein schöner Tag"]


@pytest.fixture(scope="module")
def plain():
    with serving.on_a_port(lambda: serving.make_executor(adapters=2)) as server:
        yield server


def client_of(server, key=serving.KEY, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **options)


@pytest.fixture(scope="module")
def client(plain):
    with client_of(plain, max_retries=0) as client:
        yield client


def test_errors_are_the_clients_classes(plain, client):
    with client_of(plain, "a-wrong-key", max_retries=0) as stranger:
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


def test_a_full_queue_is_asked_again_after_the_time_that_the_server_says():
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

        def go_on():
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


def test_a_timeout_ends_the_request(plain):
    numbers = plain.service.client.engine.numbers
    with (
        client_of(plain, max_retries=0, timeout=0.05) as hasty,
        pytest.raises(openai.APITimeoutError),
    ):
        hasty.completions.create(model=serving.MODEL, prompt=TEXTS * 8, n=2, **LONG)
    until(lambda: not numbers().running + numbers().waiting)

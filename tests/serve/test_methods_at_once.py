"""Texts over HTTP are the library's, for eight adapters of four methods in the same steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from tests.support import serving

RECIPES: dict[str, dict[str, Any]] = {
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


def make_executor() -> Executor:
    executor = serving.make_executor(adapters=0)
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        adapter = executor.add_adapter(name, RECIPES[name.partition("-")[0]])
        for tensor in adapter.tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
        executor.refresh_adapter(name)
    return executor


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Served]:
    with serving.on_a_port(make_executor) as server:
        yield server


async def texts(server: serving.Served, fields: dict[str, Any], stream: bool) -> list[str]:
    """The texts of every prompt under every model, all of them asked at once."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=serving.KEY, max_retries=0
    ) as client:

        async def ask(model: str, prompt: str) -> str:
            body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS}
            if not stream:
                return (await client.completions.create(**body, **fields)).choices[0].text
            parts = await client.completions.create(**body, **fields, stream=True)
            return "".join([part.choices[0].text async for part in parts])

        models = [serving.MODEL, *NAMES]
        return await asyncio.gather(*(ask(model, p) for model in models for p in PROMPTS))


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_the_librarys(
    server: serving.Served, fields: dict[str, Any], stream: bool
) -> None:
    found = asyncio.run(texts(server, fields, stream))
    alone: list[Completion] = [
        server.service.client.executor.generate(prompt, adapter, max_new_tokens=TOKENS, **fields)
        for adapter in (None, *NAMES)
        for prompt in PROMPTS
    ]
    assert found == [one.text for one in alone]
    of_adapters = [tuple(found[i : i + len(PROMPTS)]) for i in range(0, len(found), len(PROMPTS))]
    assert len(set(of_adapters)) == 1 + len(NAMES)  # each answers in its own way

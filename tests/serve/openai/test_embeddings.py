"""/v1/embeddings by the openai client: transformers' and peft's last hidden states."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pcg.runtime.admission.limits import Limits
from pcg.serve.engine.facts import ModelFacts, facts_of
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import ApiError
from pcg.serve.openai.embeddings import EmbeddingsBody
from tests.support import serving

TEXTS = ["Hello, how are you today?", "the quick brown fox", "Ein schöner Tag 😀"]


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Served]:
    with serving.on_a_port() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: serving.Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=serving.KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def states(server: serving.Served, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What computes the last hidden states of a prompt, [tokens, hidden], by name of the model."""
    folder = tmp_path_factory.mktemp("adapter")
    server.service.client.executor.save_adapter("lora-0", folder)
    loaded = AutoModelForCausalLM.from_pretrained(serving.model_directory(), dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(loaded, folder).eval()

    def compute(model: str, ids: list[int]) -> Any:
        with torch.inference_mode():
            if model != serving.MODEL:
                return adapted(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            with adapted.disable_adapter():
                return adapted(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]

    return compute


def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(serving.model_directory())


def unit(vector: Any) -> Any:
    return vector / vector.norm()


@pytest.mark.parametrize("model", [serving.MODEL, "lora-0"])
def test_texts_and_tokens_give_the_same_states(
    client: openai.OpenAI, states: Any, model: str
) -> None:
    ids = [tokenizer().encode(text) for text in TEXTS]
    wanted = [unit(states(model, one)[-1]) for one in ids]
    several = client.embeddings.create(model=model, input=TEXTS)
    as_ids = client.embeddings.create(model=model, input=ids, encoding_format="float")
    for reply in (several, as_ids):
        assert [one.index for one in reply.data] == [0, 1, 2]
        assert reply.model == model
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
        for one, vector in zip(reply.data, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(one.embedding), vector)
    for prompt in (TEXTS[0], ids[0]):  # a text, and a list of token ids, is one prompt
        (one,) = client.embeddings.create(model=model, input=prompt).data
        torch.testing.assert_close(torch.tensor(one.embedding), wanted[0])


def test_pooling_and_norm_are_a_choice(client: openai.OpenAI, states: Any) -> None:
    found = states(serving.MODEL, tokenizer().encode(TEXTS[1]))
    for pooling, state in (("last", found[-1]), ("mean", found.mean(0))):
        for normalize, wanted in ((True, unit(state)), (False, state)):
            extra = {"pooling": pooling, "normalize": normalize}
            (one,) = client.embeddings.create(
                model=serving.MODEL, input=TEXTS[1], extra_body=extra
            ).data
            torch.testing.assert_close(torch.tensor(one.embedding), wanted)


def test_a_long_prompt_is_cut_to_its_last_tokens(client: openai.OpenAI, states: Any) -> None:
    ids = tokenizer().encode(TEXTS[0])
    extra = {"truncate_prompt_tokens": 3}
    reply = client.embeddings.create(model=serving.MODEL, input=TEXTS[0], extra_body=extra)
    wanted = unit(states(serving.MODEL, ids[-3:])[-1])
    torch.testing.assert_close(torch.tensor(reply.data[0].embedding), wanted)
    assert reply.usage.prompt_tokens == 3
    ids = [5 + i % 300 for i in range(400)]
    extra = {"truncate_prompt_tokens": -1}  # as many as the model takes
    reply = client.embeddings.create(model=serving.MODEL, input=ids, extra_body=extra)
    wanted = unit(states(serving.MODEL, ids[-128:])[-1])
    torch.testing.assert_close(torch.tensor(reply.data[0].embedding), wanted)
    assert reply.usage.prompt_tokens == 128


def test_base64_is_the_bytes_of_the_same_numbers(server: serving.Served) -> None:
    body = {"model": serving.MODEL, "input": TEXTS[0]}
    with server.client() as http:
        replies = [
            http.post("/v1/embeddings", json={**body, "encoding_format": encoding}).json()
            for encoding in ("float", "base64")
        ]
    numbers, text = (reply["data"][0]["embedding"] for reply in replies)
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == np.float32(numbers).tolist()


def test_a_part_of_an_embedding_needs_a_model_that_was_trained_for_it(
    client: openai.OpenAI, server: serving.Served
) -> None:
    local = server.service.client
    width = local.facts.width
    whole = client.embeddings.create(model=serving.MODEL, input=TEXTS[0], dimensions=width)
    assert len(whole.data[0].embedding) == width
    with pytest.raises(openai.BadRequestError, match="leave dimensions out") as refused:
        client.embeddings.create(model=serving.MODEL, input=TEXTS[0], dimensions=width // 2)
    assert refused.value.param == "dimensions"

    def with_config(**fields: Any) -> Any:
        program = local.executor.program
        configured = dataclasses.replace(program, config={**program.config, **fields})
        executor = SimpleNamespace(
            program=configured,
            state=local.executor.state,
            device=local.executor.device,
            max_positions=None,
        )
        engine = SimpleNamespace(
            scheduler=SimpleNamespace(limits=Limits()),
            device=SimpleNamespace(warmed=None, cache=SimpleNamespace(size_bytes=0)),
        )
        return facts_of(executor, engine, ServeOptions())  # type: ignore[arg-type]

    def check(facts: ModelFacts, asked: int) -> None:
        EmbeddingsBody(input="a", dimensions=asked).check_dimensions(facts)

    check(with_config(is_matryoshka=True), 1)
    check(with_config(matryoshka_dimensions=[4, 8]), 8)
    for fields, asked in (({"matryoshka_dimensions": [4, 8]}, 5), ({"is_matryoshka": True}, 9999)):
        with pytest.raises(ApiError, match=f"dimensions={asked}"):
            check(with_config(**fields), asked)


def test_a_part_is_an_embedding_of_norm_1(states: Any) -> None:
    executor = serving.make_executor()
    executor.program.config["is_matryoshka"] = True  # type: ignore[index]
    wanted = unit(states(serving.MODEL, tokenizer().encode(TEXTS[0]))[-1][:5])

    body = {"model": serving.MODEL, "input": TEXTS[0], "dimensions": 5}
    with serving.service_of(executor) as service:
        reply = serving.post(service, "/v1/embeddings", body).json()
    torch.testing.assert_close(torch.tensor(reply["data"][0]["embedding"]), wanted)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "empty"),
        ({"input": []}, "text"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": ["a", [1]]}, "token ids"),
        ({"input": [[1], []]}, "token ids"),
        ({"input": [10**9]}, "1000000000"),
        ({"input": "a" * 4000}, "maximum context length"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "temperature": 1.0}, "temperature"),
    ],
)
def test_bad_bodies_are_refused_by_name(
    server: serving.Served, body: dict[str, Any], words: str
) -> None:
    with server.client() as http:
        reply = http.post("/v1/embeddings", json={"model": serving.MODEL, **body})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="nobody", input="a")

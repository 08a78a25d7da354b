"""Bodies that cost the server far more than the client that sent them: each is refused early."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

import pcg.serve.service
from pcg.serve.openai import text_bound
from pcg.serve.openai.chat.body import ChatBody
from pcg.serve.openai.chat.messages import MOST_PARTS
from pcg.serve.openai.completions import CompletionBody
from pcg.serve.openai.responses.body import ResponseBody
from pcg.serve.openai.tokens import DetokenizeBody
from pcg.serve.openai.wire import WireModel
from tests.support import serving

MANY = 5_000
PART = {"type": "text", "text": ""}
TEXT = {"model": "a", "prompt": "a"}


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "a", "messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, chat([{}] * MANY)),
        (ChatBody, chat("a", documents=[0] * MANY)),
        (ChatBody, chat("a", metadata={str(i): i for i in range(MANY)})),
        (CompletionBody, {**TEXT, "stop": [1] * MANY}),
        (CompletionBody, {**TEXT, "logit_bias": {str(i): "" for i in range(MANY)}}),
        (CompletionBody, {**TEXT, **{f"field{i}": 1 for i in range(MANY)}}),
        (DetokenizeBody, {"tokens": [-1] * MANY}),
        (ResponseBody, {"model": "a", "input": [0] * MANY}),
        (ResponseBody, {"model": "a", "input": [{"content": [{}] * MANY}]}),
    ],
)
def test_a_body_has_an_error_or_two(kind: type[WireModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 2


def test_messages_have_a_bound_of_parts() -> None:
    ChatBody.model_validate(chat([PART] * MOST_PARTS))
    with pytest.raises(ValidationError, match="8193 parts and tool calls"):
        ChatBody.model_validate(chat([PART] * (MOST_PARTS + 1)))
    with pytest.raises(ValidationError, match="8193 parts and tool calls"):
        ResponseBody.model_validate({"model": "a", "input": [{"output": [PART] * 8193}]})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("path", "field", "status"),
    [
        ("/v1/completions", '"prompt":', 400),
        ("/v1/completions", '"prompt":"a","unknown":', 400),
        ("/v1/chat/completions", '"messages":[{"role":"user","content":"a"}],"prediction":', 200),
    ],
)
def test_lists_in_lists_are_no_fault_of_the_server(path: str, field: str, status: int) -> None:
    async def post(content: str) -> int:
        async with serving.client_of(service) as client:
            headers = {"content-type": "application/json"}
            return (await client.post(path, content=content, headers=headers)).status_code

    with serving.service_of() as service:
        body = f'{{"model":"{serving.MODEL}","max_tokens":1,{field}{nested(700)}}}'
        assert asyncio.run(post(body)) == status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "aa"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "aa"}]}),
        ("/tokenize", {"prompt": "aa"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "aa"}]}),
    ],
)
def test_texts_are_bounded_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(text_bound, "SHORT", 1)
    monkeypatch.setattr(text_bound, "TOKEN_CHARACTERS", 1)

    async def post() -> Any:
        async with serving.client_of(service) as client:
            reply = await client.post(path, json={"model": serving.MODEL, **body})
            return reply.json()

    with serving.service_of(max_model_len=1) as service:
        assert asyncio.run(post())["error"]["message"].startswith("A text has ")


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}], ids=["vllm", "openai"]
)
def test_logprobs_of_prompts_have_a_bound(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(pcg.serve.service, "MOST_PROMPT_LOGPROBS", 40)

    async def post(**fields: Any) -> dict[str, Any]:
        async with serving.client_of(service) as client:
            body = {"model": serving.MODEL, "prompt": [1, 2, 3, 4], "max_tokens": 1, **asked}
            found: dict[str, Any] = (
                await client.post("/v1/completions", json=body | fields)
            ).json()
            return found

    with serving.service_of() as service:
        assert len(asyncio.run(post(n=2))["choices"]) == 2
        refused = asyncio.run(post(n=3))["error"]["message"]
        assert refused.startswith("60 log-probabilities of prompts' tokens")
        refused = asyncio.run(post(prompt=[[1, 2, 3], [4, 5, 6], [7, 8, 9]]))["error"]["message"]
        assert refused.startswith("45 log-probabilities")

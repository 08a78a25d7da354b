"""Bodies that cost the server far more than the client that sent them: each is refused early."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

import pcg.serve.http.service
from pcg.serve.http import service as text_bound
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.chat import ChatBody
from pcg.serve.openai.completions import CompletionBody
from pcg.serve.openai.messages import MOST_PARTS
from pcg.serve.openai.models import DetokenizeBody
from pcg.serve.openai.responses import ResponseBody
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
    headers = {**serving.HEADERS, "content-type": "application/json"}
    body = f'{{"model":"{serving.MODEL}","max_tokens":1,{field}{nested(700)}}}'
    with serving.service_of() as service:
        assert serving.ask(service, "POST", path, headers, content=body).status_code == status


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
    with serving.service_of(max_model_len=1) as service:
        refused = serving.post(service, path, {"model": serving.MODEL, **body}).json()
    assert refused["error"]["message"].startswith("A text has ")


def test_tokens_are_bounded_before_they_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_bound, "FEW", 3)
    with serving.service_of(max_model_len=4) as service:
        replies = [
            serving.post(service, "/detokenize", {"tokens": [5] * count}) for count in (4, 5)
        ]
    assert [reply.status_code for reply in replies] == [200, 400]
    error = replies[1].json()["error"]
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")
    assert "5 tokens, and this server takes at most 4" in error["message"]


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}], ids=["vllm", "openai"]
)
def test_logprobs_of_prompts_have_a_bound(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(pcg.serve.http.service, "MOST_PROMPT_LOGPROBS", 40)

    body = {"model": serving.MODEL, "prompt": [1, 2, 3, 4], "max_tokens": 1, **asked}
    with serving.service_of() as service:
        post = partial(serving.post, service, "/v1/completions")
        assert len(post({**body, "n": 2}).json()["choices"]) == 2
        refused = post({**body, "n": 3}).json()["error"]["message"]
        assert refused.startswith("60 log-probabilities of prompts' tokens")
        prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        refused = post({**body, "prompt": prompts}).json()["error"]["message"]
        assert refused.startswith("45 log-probabilities")


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"prompt": "abcdefgh", "echo": True}, 8),
        ({"prompt": [1, 2, 3, 4], "echo": True}, 4),
        ({"prompt": [[1, 2], [3, 4]], "return_token_ids": True}, 4),
        ({"prompt": [1, 2, 3, 4], "return_token_ids": True, "echo": True, "stream": True}, 8),
    ],
)
def test_prompts_that_continuations_repeat_have_a_bound(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], size: int
) -> None:
    monkeypatch.setattr(pcg.serve.http.service, "MOST_REPEATED", 2 * size)
    body = {"model": serving.MODEL, "max_tokens": 1, **asked}
    with serving.service_of() as service:
        assert serving.post(service, "/v1/completions", {**body, "n": 2}).status_code == 200
        refused = serving.post(service, "/v1/completions", {**body, "n": 3})
        plain = {**body, "n": 3, "echo": False, "return_token_ids": False}
        assert serving.post(service, "/v1/completions", plain).status_code == 200
    assert refused.status_code == 400
    assert f"repeat {3 * size} characters and token ids" in refused.json()["error"]["message"]

"""Bodies: integers, costly ones refused early, long ones read beside the loop, JSON as sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from functools import partial

import httpx2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

import pcg.serve.http.service
from pcg.keys import Keys
from pcg.serve.http import service as long_body
from pcg.serve.http import service as text_bound
from pcg.serve.http.limits import MOST_CONTAINERS, _counts, _without_texts
from pcg.serve.http.wire import WireModel, json_bytes
from pcg.serve.openai.chat import ChatBody
from pcg.serve.openai.completions import CompletionBody
from pcg.serve.openai.messages import MOST_PARTS
from pcg.serve.openai.models import DetokenizeBody
from pcg.serve.openai.replies import event
from pcg.serve.openai.responses import ResponseBody
from pcg.serve.openai.wire import Prompts
from tests.support import serving

MANY = 5_000
PART = {"type": "text", "text": ""}
TEXT = {"model": "a", "prompt": "a"}


def chat(content, **fields):
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
def test_a_body_has_an_error_or_two(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 2


def test_messages_have_a_bound_of_parts():
    ChatBody.model_validate(chat([PART] * MOST_PARTS))
    with pytest.raises(ValidationError, match="8193 parts and tool calls"):
        ChatBody.model_validate(chat([PART] * (MOST_PARTS + 1)))
    with pytest.raises(ValidationError, match="8193 parts and tool calls"):
        ResponseBody.model_validate({"model": "a", "input": [{"output": [PART] * 8193}]})


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("path", "field", "status"),
    [
        ("/v1/completions", '"prompt":', 400),
        ("/v1/completions", '"prompt":"a","unknown":', 400),
        ("/v1/chat/completions", '"messages":[{"role":"user","content":"a"}],"prediction":', 200),
    ],
)
def test_lists_in_lists_are_no_fault_of_the_server(service, path, field, status):
    headers = {**serving.HEADERS, "content-type": "application/json"}
    body = f'{{"model":"{serving.MODEL}","max_tokens":1,{field}{nested(700)}}}'
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
def test_texts_are_bounded_before_they_are_tokenized(monkeypatch, path, body):
    monkeypatch.setattr(text_bound, "SHORT", 1)
    monkeypatch.setattr(text_bound, "TOKEN_CHARACTERS", 1)
    with serving.service_of(max_model_len=1) as service:
        refused = serving.post(service, path, {"model": serving.MODEL, **body}).json()
    assert refused["error"]["message"].startswith("A text has ")


def test_tokens_are_bounded_before_they_become_text(monkeypatch):
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
def test_logprobs_of_prompts_have_a_bound(service, monkeypatch, asked):
    monkeypatch.setattr(pcg.serve.http.service, "MOST_PROMPT_LOGPROBS", 40)

    body = {"model": serving.MODEL, "prompt": [1, 2, 3, 4], "max_tokens": 1, **asked}
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
def test_prompts_that_continuations_repeat_have_a_bound(service, monkeypatch, asked, size):
    monkeypatch.setattr(pcg.serve.http.service, "MOST_REPEATED", 2 * size)
    body = {"model": serving.MODEL, "max_tokens": 1, **asked}
    assert serving.post(service, "/v1/completions", {**body, "n": 2}).status_code == 200
    refused = serving.post(service, "/v1/completions", {**body, "n": 3})
    plain = {**body, "n": 3, "echo": False, "return_token_ids": False}
    assert serving.post(service, "/v1/completions", plain).status_code == 200
    assert refused.status_code == 400
    assert f"repeat {3 * size} characters and token ids" in refused.json()["error"]["message"]


class Body(WireModel):
    count: int | None = None
    share: float | None = None
    ids: list[int] | None = None
    prompt: Prompts | None = None


def test_numbers_without_a_fraction_are_integers():
    body = Body(count=3.0, share=1.0, ids=[1.0, 2], prompt=[[1.0, 2.0], [3]])
    assert (body.count, body.share, body.ids, body.prompt) == (3, 1.0, [1, 2], [[1, 2], [3]])
    assert type(body.count) is int
    assert type(body.share) is float
    assert {type(one) for one in body.ids or ()} == {int}


@pytest.mark.parametrize(
    "body",
    [{"count": 3.5}, {"count": "3"}, {"count": True}, {"ids": [1.5]}, {"count": float("inf")}],
)
def test_other_numbers_are_refused(body):
    with pytest.raises(ValidationError):
        Body(**body)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_a_prompt_has_four_forms(given, prompts):
    assert Body(prompt=given).prompt == prompts


def strict(text):
    """JSON, without the words that Python reads beside it."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("beside", ["x", "half \ud800", 10**30])
def test_numbers_that_json_does_not_have_are_null(beside):
    """Whichever writer takes it: the fast one has no large integers and no half characters."""
    content = {"a": [float("nan"), {"b": (float("inf"), 1.5)}], "c": beside}
    assert strict(json_bytes(content)) == {"a": [None, {"b": [None, 1.5]}], "c": beside}


def test_a_client_that_splits_text_finds_the_lines_that_were_sent():
    text = "".join(map(chr, range(0x100))) + "\u2028\u2029\u2027\u202a é"
    content = event({"text": text}) + event({"text": "next"})
    first, _, second, _ = httpx2.Response(200, content=content).iter_lines()
    assert strict(first.removeprefix("data: ").encode()) == {"text": text}
    assert second == 'data: {"text":"next"}'


JSON = {**serving.HEADERS, "content-type": "application/json"}
PADDING = "x" * long_body.LONG_BYTES
USER = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": ({"prompt": "a", "max_tokens": 3, "temperature": 0}, "choices"),
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 3, "temperature": 0}, "choices"),
    "/v1/responses": ({"input": "a", "max_output_tokens": 3, "temperature": 0}, "usage"),
    "/v1/embeddings": ({"input": "a"}, "data"),
}


@pytest.fixture
def threads(monkeypatch):
    """The threads that long bodies were validated on."""
    found = []
    validated = long_body.validated

    def noted(field, body):
        found.append(threading.current_thread().name)
        return validated(field, body)

    monkeypatch.setattr(long_body, "validated", noted)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_replies_are_those_of_short_bodies(service, threads, path):
    body, part = BODIES[path]
    short = serving.post(service, path, {**body, "user": "x"}).json()
    assert threads == []
    long = serving.post(service, path, {**body, "user": PADDING}).json()
    assert long[part] == short[part]
    assert [name.startswith("pcg serve") for name in threads] == [True]


def test_texts_and_chats_are_tokenized(service, threads):
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
def test_errors_are_those_of_short_bodies(service, threads, monkeypatch, content):
    async def send():
        async with serving.client_of(service, JSON) as client:
            reply = await client.post("/v1/completions", content=content)
            assert reply.status_code == 400
            return reply.json()["error"]

    found = asyncio.run(send())
    assert len(threads) == 1
    monkeypatch.setattr(long_body, "LONG_BYTES", 2**30)
    assert asyncio.run(send()) == found
    assert len(threads) == 1


def test_others_go_on_meanwhile(service, monkeypatch):
    gate, is_there = threading.Event(), threading.Event()
    validated = long_body.validated

    def waiting(field, body):
        is_there.set()
        assert gate.wait(60)
        return validated(field, body)

    monkeypatch.setattr(long_body, "validated", waiting)

    async def send():
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


def test_bodies_are_counted_by_tenant_whatever_keys_they_come_with():
    """Eight bodies of the largest size may be under way; a second key brings no more."""
    keys = Keys([serving.key("a", tenant="red"), serving.key("b", tenant="red"), serving.key("c")])
    whole = asyncio.Event()

    async def slowly():
        yield b" " * (2**20 - 1)
        await whole.wait()
        yield b" "

    with serving.service_of(keys=keys, max_body_mib=1.0) as service:

        async def ask():
            async with serving.client_of(service) as client:

                def post(name):
                    headers = {**serving.headers_of(name), "content-type": "application/json"}
                    return asyncio.ensure_future(
                        client.post("/v1/completions", content=slowly(), headers=headers)
                    )

                asked = [post(name) for name in "ab" for _ in range(5)]
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                other = post("c")
                await asyncio.sleep(0)
                whole.set()
                await asyncio.gather(*asked)
                return [one.result().status_code for one in asked], (await other).status_code

        statuses, other = asyncio.run(ask())
    # The body itself is no JSON, which is told to who was read to the end.
    assert statuses.count(429) == 2
    assert statuses.count(400) == 8
    assert other == 400


TOO_MANY = {
    "lists and objects": ("x", [[]] * (MOST_CONTAINERS + 1)),
    "objects": ("x", [{}] * (MOST_CONTAINERS + 1)),
    "token ids": ("prompt", [1] * 10**6),
    "names": ("logit_bias", {str(token): 1 for token in range(122_000)}),
    "fields": ("x", {f"field{index}": None for index in range(100_000)}),
    "texts": ("stop", ["a"] * (2**17 + 1)),
}


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        pytest.param(kind, beside, marks=[] if (row + column) % 4 == 0 else pytest.mark.slow)
        for row, kind in enumerate(TOO_MANY)
        for column, beside in enumerate(("", '"' * 101, "\\", '\\"[{,:'))
    ],
)
def test_bodies_of_too_many_elements_are_refused_before_objects_are_made(
    service, monkeypatch, kind, beside
):
    """Whatever stands in texts beside them."""

    def read(*_):
        raise AssertionError("the body was read")

    monkeypatch.setattr(long_body, "validated", read)
    name, value = TOO_MANY[kind]
    reply = serving.post(service, "/v1/completions", {"a": beside, name: value, "z": beside})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "body_too_large"
    assert "more than" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", [*(pytest.param(x, marks=pytest.mark.slow) for x in "[,:\\"), "{", '\\"', '"[{,:']
)
def test_texts_may_have_any_characters(service, text):
    reply = serving.post(service, "/tokenize", {"prompt": text * (900_000 // len(text))})
    assert reply.status_code == 200


LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\[]{},:\n\x00é', max_size=9)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"\\,:{'), inner),
    max_leaves=40,
)


@given(VALUES, st.booleans(), st.integers(1, 40))
@example(["\\", '"', "\\" * 9 + '",'], True, 1)
def test_elements_are_counted_exactly(value, is_ascii, size):
    """As Python's reader finds them; entries are counted with the brackets around them."""
    text = np.frombuffer(json.dumps(value, ensure_ascii=is_ascii).encode(), np.uint8)
    parts = [text[place : place + size] for place in range(0, len(text), size)]
    counts = sum((_counts(*part) for part in _without_texts(parts)), Counter[str]())
    found = Counter[str]()

    def walk(one):
        if isinstance(one, str):
            found["quotation marks"] += 2
        elif isinstance(one, dict | list):
            found["lists and objects"] += 1
            found["values"] += 1 + max(len(one) - 1, 0)
            if isinstance(one, dict):
                found["names"] += len(one)
                found["quotation marks"] += 2 * len(one)
            for part in one.values() if isinstance(one, dict) else one:
                walk(part)

    walk(value)
    assert counts == found

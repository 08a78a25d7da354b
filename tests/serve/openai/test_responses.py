"""The Responses API by OpenAI's own client; streams that fail, and responses that are kept."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFailedEvent
from pydantic import BaseModel, TypeAdapter

from pcg.errors import GenerationError
from pcg.keys import Keys
from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.openai.response_items import InputItem, KeptResponse, ResponseStore, memory_of
from pcg.serve.openai.responses import ResponseBody, Responses, begun_response
from pcg.serve.openai.sampling import SamplingDefaults
from pcg.serve.openai.tools import ChatSupport, ToolUse
from tests.support import serving

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "stop", "parameters": None, "strict": None},
]


class Animal(BaseModel):
    kind: Literal["dog", "fox"]
    is_lazy: bool


@pytest.fixture(scope="module")
def spaces(server):
    return {"logit_bias": serving.white_space(server.service)}


def ask(client, **fields):
    asked = {"model": serving.MODEL, "input": "what is it?", "temperature": 0, **fields}
    asked.setdefault("max_output_tokens", 12)
    return client.responses.create(**asked)


def prompt_of(server, messages, **variables):
    tokenizer = server.service.part(ChatSupport).tokenizer
    return tokenizer.encode_chat(messages, **variables)


USER = {"role": "user", "content": "what is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_text_is_the_librarys(server, client):
    prompt = prompt_of(server, [SYSTEM, USER])
    for model, adapter in ((serving.MODEL, None), ("lora-0", "lora-0")):
        (expected,) = server.service.client.executor.generate([prompt], adapter, max_new_tokens=12)
        reply = ask(client, model=model, instructions="Be brief.", metadata={"a": "b"})
        assert reply.output_text == expected.text
        assert (reply.status, reply.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert (reply.model, reply.instructions, reply.metadata) == (model, "Be brief.", {"a": "b"})
        assert reply.system_fingerprint == (model if adapter is None else f"{adapter}@2")
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), 12)
        item = {"role": "user", "content": [{"type": "input_text", "text": "what is it?"}]}
        same = ask(client, model=model, input=[{"role": "system", "content": "Be brief."}, item])
        assert same.output_text == expected.text


def test_replies_are_of_the_clients_types(client):
    """The client does not check what it reads; its types do."""
    for tools in ([], TOOLS):
        reply = ask(
            client,
            tools=tools,
            tool_choice="required" if tools else "none",
            parallel_tool_calls=False,
            max_output_tokens=200,
            reasoning={"effort": "low"},
            text={"verbosity": "low"},
        )
        TypeAdapter(Response).validate_python(reply.model_dump(), strict=True)


def test_the_events_of_a_stream(client):
    events = list(ask(client, stream=True))
    whole = ask(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert deltas > 3
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-5 + 1].text == whole.output_text
    final = events[-1].response
    assert final.output_text == text
    assert final.usage == whole.usage
    assert {event.item_id for event in events[3:-2]} == {final.output[0].id}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called(client, stream):
    asked = {
        "model": serving.MODEL,
        "input": "what is it?",
        "temperature": 0,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 200,
    }
    if stream:
        with client.responses.stream(**asked) as events:
            kinds = [event.type for event in events]
            reply = events.get_final_response()
        assert kinds.count("response.function_call_arguments.delta") > 3
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    else:
        reply = client.responses.create(**asked)
    (call,) = reply.output
    assert (call.type, call.name, reply.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments).keys() == {"city", "days"}
    assert call.status == "completed"


def test_a_pydantic_model_is_parsed(client, spaces):
    asked = {
        "model": serving.MODEL,
        "input": "what is it?",
        "temperature": 0,
        "text_format": Animal,
        "max_output_tokens": 80,
        "extra_body": spaces,
    }
    parsed = client.responses.parse(**asked)
    assert isinstance(parsed.output_parsed, Animal)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_response_goes_on_from_another(server, client):
    first = ask(client, instructions="Be brief.")
    second = ask(client, input="and then?", previous_response_id=first.id)
    said = {"role": "assistant", "content": first.output_text}
    then = {"role": "user", "content": "and then?"}
    prompt = prompt_of(server, [USER, said, then])
    assert second.usage.input_tokens == len(prompt)
    (expected,) = server.service.client.executor.generate([prompt], max_new_tokens=12)
    assert second.output_text == expected.text
    by_items = ask(client, input=[USER, *first.output, then])
    assert by_items.output_text == expected.text
    third = ask(client, input="a", previous_response_id=second.id, stream=True)
    assert list(third)[-1].response.previous_response_id == second.id


def test_a_functions_output_goes_on(server, client):
    named = {"type": "function", "name": "weather"}
    first = ask(client, tools=TOOLS, tool_choice=named, max_output_tokens=200)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = ask(client, input=[result], previous_response_id=first.id)
    function = {"name": "weather", "arguments": json.loads(call.arguments)}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    prompt = prompt_of(server, [USER, called, {"role": "tool", "content": "sunny"}])
    assert second.usage.input_tokens == len(prompt)


def test_responses_are_kept_until_they_are_deleted(client):
    reply = ask(client)
    assert client.responses.retrieve(reply.id) == reply
    items = client.responses.input_items.list(reply.id)
    assert [item.content for item in items] == ["what is it?"]
    streamed = list(ask(client, stream=True))[-1].response
    assert client.responses.retrieve(streamed.id) == streamed
    client.responses.delete(reply.id)
    for act in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(reply.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=reply.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = ask(client, store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_input_items_come_in_pages(client):
    texts = [f"message {index}" for index in range(5)]
    reply = ask(client, input=[{"role": "user", "content": text} for text in texts])
    listed = client.responses.input_items.list(reply.id, limit=2, order="asc")
    assert listed.has_more
    assert [item.content for item in listed] == texts
    listed = client.responses.input_items.list(reply.id, limit=2)
    assert [item.content for item in listed] == texts[::-1]


def test_logprobs_of_a_response(client):
    include = ["message.output_text.logprobs"]
    reply = ask(client, include=include, top_logprobs=2)
    found = reply.output[0].content[0].logprobs
    assert len(found) == 12
    assert all(len(one.top_logprobs) == 2 for one in found)
    assert found[0].top_logprobs[0].logprob == found[0].logprob
    events = list(ask(client, include=include, top_logprobs=2, stream=True))
    parts = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    told = [one.logprob for part in parts for one in part]
    assert told == [one.logprob for one in found[: len(told)]]
    assert events[-1].response.output[0].content[0].logprobs == found


GIVEN_UP = Completion("a dog", (1, 2), "timed_out", None, 3)


def events(*chunks):
    """The events of chunks, of which an exception is raised."""
    response = begun_response("resp_1", "tiny", ResponseBody(input="a"), SamplingDefaults())
    made = Responses([], response, ToolUse(), lambda whole: whole)
    sent = made.begin()
    try:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            sent += made.step(0, [chunk])
        sent += made.end()
    except Exception as error:
        sent += made.failed(error)
    text = sent.decode()
    found = [json.loads(event.split("\ndata: ")[1]) for event in text.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (Chunk(0, "", None, completion=GIVEN_UP), "server_error"),
        (GenerationError("the logits are not finite"), "invalid_prompt"),
        (RuntimeError("a secret"), "server_error"),
    ],
)
def test_what_fails_is_the_last_event(last, code):
    found = events(Chunk(0, "a dog", 1), last)
    assert found[-2]["delta"] == "a dog"
    assert found[-1]["type"] == "response.failed"
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", code)
    assert failed["output"][0]["content"][0]["text"] == "a dog"
    assert "secret" not in json.dumps(found)
    ResponseFailedEvent.model_validate(found[-1])


def kept(size):
    return KeptResponse(b"x" * size, (), (), 0)


def test_the_least_recently_read_goes_first():
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


def test_empty_parts_count_by_their_memory():
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


def test_nobody_elses_response_is_there():
    keys = Keys([serving.key("ann"), serving.key("ben"), serving.key("ann-2", tenant="ann")])

    async def run():
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


async def refused(client, path, body, kept_id):
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

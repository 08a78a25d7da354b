"""The Responses API by OpenAI's own client, over loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

from pcg.serve.openai.tools import ChatSupport
from tests.support import chat_templates, serving, tiny_llama

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "stop", "parameters": None, "strict": None},
]


class Animal(BaseModel):
    kind: Literal["dog", "fox"]
    is_lazy: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Served]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    model = tiny_llama.save(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    load = partial(serving.make_executor, directory=model)
    with serving.on_a_port(load, chat_template=template) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: serving.Served) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=serving.KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def spaces(server: serving.Served) -> dict[str, Any]:
    return {"logit_bias": serving.white_space(server.service)}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": serving.MODEL, "input": "what is it?", "temperature": 0, **fields}
    asked.setdefault("max_output_tokens", 12)
    return client.responses.create(**asked)


def prompt_of(server: serving.Served, messages: list[Any], **variables: Any) -> list[int]:
    tokenizer = server.service.part(ChatSupport).tokenizer
    assert tokenizer is not None
    return tokenizer.encode_chat(messages, **variables)


USER = {"role": "user", "content": "what is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_text_is_the_librarys(server: serving.Served, client: openai.OpenAI) -> None:
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


def test_replies_are_of_the_clients_types(client: openai.OpenAI) -> None:
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


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
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
def test_functions_are_called(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
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
            reply: Any = events.get_final_response()
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


def test_a_pydantic_model_is_parsed(client: openai.OpenAI, spaces: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
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


def test_a_function_of_a_pydantic_model(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=serving.MODEL,
        input="a",
        tools=[openai.pydantic_function_tool(Animal)["function"] | {"type": "function"}],  # type: ignore[operator, list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=200,
    )
    assert json.loads(parsed.output[0].arguments).keys() == {"kind", "is_lazy"}  # type: ignore[union-attr]


def test_a_response_goes_on_from_another(server: serving.Served, client: openai.OpenAI) -> None:
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


def test_a_functions_output_goes_on(server: serving.Served, client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "weather"}
    first = ask(client, tools=TOOLS, tool_choice=named, max_output_tokens=200)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = ask(client, input=[result], previous_response_id=first.id)
    function = {"name": "weather", "arguments": json.loads(call.arguments)}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    prompt = prompt_of(server, [USER, called, {"role": "tool", "content": "sunny"}])
    assert second.usage.input_tokens == len(prompt)


def test_responses_are_kept_until_they_are_deleted(client: openai.OpenAI) -> None:
    reply = ask(client)
    assert client.responses.retrieve(reply.id) == reply
    items = client.responses.input_items.list(reply.id)
    assert [item.content for item in items] == ["what is it?"]  # type: ignore[union-attr]
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


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    texts = [f"message {index}" for index in range(5)]
    reply = ask(client, input=[{"role": "user", "content": text} for text in texts])
    listed = client.responses.input_items.list(reply.id, limit=2, order="asc")
    assert listed.has_more
    assert [item.content for item in listed] == texts  # type: ignore[union-attr]
    listed = client.responses.input_items.list(reply.id, limit=2)
    assert [item.content for item in listed] == texts[::-1]  # type: ignore[union-attr]


def test_logprobs_of_a_response(client: openai.OpenAI) -> None:
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


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "a"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", '"disabled"'),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "valid string"),
        ({"input": [5]}, "input.0", "be an object"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "'item_reference'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "Missing"),
        ({"input": [{"role": "user", "content": "a", "color": 1}]}, None, "input[0].color"),
        ({"extra_body": {"n": 2}}, "n", "not supported"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens", "Unrecognized"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0]",
            "'input_image'",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "messages",
            "arguments",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, says: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **({"stream": True} if stream else {}), **fields)
    assert says in caught.value.message
    assert caught.value.param == param

"""/v1/messages by Anthropic's own client."""

from __future__ import annotations

import json

import anthropic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params, tool_param
from pydantic import BaseModel

from pcg.errors import QueueFullError
from pcg.serve.openai.anthropic import CountBody, GivenTool, MessageBlocks, MessagesBody
from pcg.serve.openai.tools import ToolUse
from tests.support import serving

USER = {"role": "user", "content": "what is it?"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "weather", "description": "The weather.", "input_schema": WEATHER},
    {"name": "stop", "input_schema": {"type": "object", "additionalProperties": False}},
]


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=serving.KEY, max_retries=0) as client:
        yield client


def asked(extra_body=None, **fields):
    """Fields of a greedy request; the newest client has no argument for the temperature."""
    return {
        "model": serving.MODEL,
        "messages": [USER],
        "max_tokens": 20,
        "extra_body": {"temperature": 0, **(extra_body or {})},
        **fields,
    }


def streamed(client, **fields):
    with client.messages.stream(**asked(**fields)) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def chat(server, messages, **fields):
    body = {"model": serving.MODEL, "messages": list(messages), "max_tokens": 20, "temperature": 0}
    with server.client() as client:
        return client.post("/v1/chat/completions", json={**body, **fields}).json()


@pytest.mark.parametrize("model", [serving.MODEL, "lora-0"])
def test_text_is_that_of_chats(server, client, model):
    system = {"role": "system", "content": "Be brief."}
    expected = chat(server, [system, USER], model=model)
    text, usage = expected["choices"][0]["message"]["content"], expected["usage"]
    parts = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for given in ("Be brief.", parts):
        message = client.messages.create(**asked(system=given, model=model))
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": text}]
        assert (message.model, message.role, message.type) == (model, "assistant", "message")
        assert message.stop_reason == "max_tokens"
        read = message.usage.cache_read_input_tokens or 0
        assert message.usage.input_tokens + read == usage["prompt_tokens"]
        assert message.usage.output_tokens == usage["completion_tokens"]
        assert message._request_id is not None
        final, events = streamed(client, system=given, model=model)
        assert [block.text for block in final.content] == [text]
        assert final.stop_reason == "max_tokens"
        assert final.usage.output_tokens == usage["completion_tokens"]
        kinds = [event.type for event in events if event.type != "text"]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        count = client.messages.count_tokens(model=model, messages=[USER], system=given)
        assert count.input_tokens == usage["prompt_tokens"]


def test_an_output_ends_by_a_sequence_or_by_itself(server, client):
    text = chat(server, [USER])["choices"][0]["message"]["content"]
    sequence = text[4:8]
    message = client.messages.create(**asked(stop_sequences=[sequence, "not in it"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", sequence)
    assert message.content[0].text == text[: text.index(sequence)]
    final, _ = streamed(client, stop_sequences=[sequence])
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", sequence)
    schema = {"type": "object", "properties": {"a": {"enum": ["dog"]}}, "required": ["a"]}
    config = {
        "format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    }
    message = client.messages.create(**asked(output_config=config))
    assert json.loads(message.content[0].text) == {"a": "dog"}
    assert message.stop_reason == "end_turn"


class Animal(BaseModel):
    is_lazy: bool


def test_an_object_of_a_class_is_parsed(client):
    fields = asked(max_tokens=60)
    message = client.messages.parse(**fields, output_format=Animal)
    assert isinstance(message.parsed_output, Animal)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_used_and_their_results_read(server, client, stream):
    for choice, names in (
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "stop"}),
        ({"type": "tool", "name": "weather"}, {"weather"}),
    ):
        fields = asked(tools=TOOLS, tool_choice=choice, max_tokens=150)
        if stream:
            message, events = streamed(client, **fields)
            partial_json = "".join(e.partial_json for e in events if e.type == "input_json")
            assert json.loads(partial_json) == message.content[0].input
        else:
            message = client.messages.create(**fields)
        (block,) = message.content
        assert block.type == "tool_use"
        assert block.name in names
        assert message.stop_reason == "tool_use"
        if block.name == "weather":
            assert block.input.keys() == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "23 degrees"}
    turns = [
        USER,
        {"role": "assistant", "content": [block.to_dict()]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    call = {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": json.dumps(block.input)},
    }
    same = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": block.id, "content": "23 degrees"},
        {"role": "user", "content": "And?"},
    ]
    shown = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                **({"description": tool["description"]} if "description" in tool else {}),
                "parameters": tool["input_schema"],
            },
        }
        for tool in TOOLS
    ]
    expected = chat(server, same, tools=shown)
    message = client.messages.create(**asked(messages=turns, tools=TOOLS))
    assert message.content[0].text == expected["choices"][0]["message"]["content"]
    count = client.messages.count_tokens(model=serving.MODEL, messages=turns, tools=TOOLS)
    assert count.input_tokens == expected["usage"]["prompt_tokens"]


def test_what_the_assistant_began_goes_on(server, client):
    begun = [USER, {"role": "assistant", "content": "a dog "}]
    expected = chat(server, begun, continue_final_message=True)
    message = client.messages.create(**asked(messages=begun))
    assert message.content[0].text == expected["choices"][0]["message"]["content"]
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": ""}]
    turns = [
        USER,
        {"role": "assistant", "content": [*thought, {"type": "text", "text": "x"}]},
        USER,
    ]
    client.messages.create(**asked(messages=turns, thinking={"type": "disabled"}))


def test_the_whole_context_is_a_bound(client):
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**asked(max_tokens=5000))


def test_the_clients_fields_are_known():
    """Each is taken, or refused by its name."""
    bodies = (
        (MessagesBody, message_create_params.MessageCreateParamsStreaming),
        (CountBody, message_count_tokens_params.MessageCountTokensParams),
        (GivenTool, tool_param.ToolParam),
    )
    for ours, theirs in bodies:
        assert theirs.__annotations__.keys() - ours.model_fields.keys() == set()
    base = message_create_params.MessageCreateParamsBase
    assert base.__annotations__.keys() - MessagesBody.model_fields.keys() == set()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
EMPTY = [{"type": "text", "text": ""}] * 9000
MANY = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": EMPTY}]}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\.0\.content\.0 is of"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
        ({"messages": []}, "at least 1"),
        ({"messages": [MANY]}, "9000 parts and tool calls"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
        ({"tools": [SEARCH]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget"),
        ({"container": "c"}, "container is not supported"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_c",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_c"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_in_anthropics_shape(client, fields, says, stream):
    with pytest.raises(anthropic.BadRequestError, match=says) as caught:
        client.messages.create(**asked(stream=stream, **fields))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "response_format" not in str(caught.value)


def test_other_errors_have_their_classes(server, client):
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as caught:
        client.messages.create(**asked(model="other"))
    assert caught.value.body["error"]["type"] == "not_found_error"
    stranger = anthropic.Anthropic(base_url=server.url, api_key="no-such-key", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(**asked())
    assert refused.value.body["error"]["type"] == "authentication_error"
    with server.client() as plain:
        reply = plain.post("/v1/messages", content=b"{")
        assert (reply.status_code, reply.json()["type"]) == (400, "error")
        missing = plain.get("/v1/messages")
        assert (missing.status_code, missing.json()["type"]) == (405, "error")


def test_what_fails_within_a_stream_is_its_last_event():
    events = MessageBlocks([], "msg_1", "tiny", ToolUse())
    name, data, *rest = events.failed(QueueFullError("it is full")).decode().split("\n")
    assert (name, rest) == ("event: error", ["", ""])
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] == "rate_limit_error"

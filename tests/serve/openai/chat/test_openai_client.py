"""Chat completions by OpenAI's own client, over loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from pcg.serve.openai.tools import ChatSupport
from tests.support import chat_templates, serving, tiny_llama

USER: list[Any] = [{"role": "user", "content": "what is it?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "stop", "description": "Stops."}},
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
    with client_of(server) as client:
        yield client


def client_of(server: serving.Served, key: str = serving.KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def spaces(server: serving.Served) -> dict[str, int]:
    return serving.white_space(server.service)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {
        "model": serving.MODEL,
        "messages": USER,
        "temperature": 0,
        "max_tokens": 150,
        **fields,
    }
    return client.chat.completions.create(**asked)


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """The completion that the client puts together of a stream."""
    asked = {
        "model": serving.MODEL,
        "messages": USER,
        "temperature": 0,
        "max_tokens": 150,
        **fields,
    }
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def test_greedy_text_is_the_librarys(server: serving.Served, client: openai.OpenAI) -> None:
    executor, tokenizer = server.service.client.executor, server.service.part(ChatSupport).tokenizer
    assert tokenizer is not None
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    prompt = tokenizer.encode_chat(messages)
    for model, adapter in ((serving.MODEL, None), ("lora-0", "lora-0")):
        (expected,) = executor.generate([prompt], adapter, max_new_tokens=24)
        asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 24}
        reply = ask(client, **asked)
        assert reply.choices[0].message.content == expected.text
        chunks = ask(client, stream=True, **asked)
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(parts) == expected.text
        assert reply.model == model
        assert reply.system_fingerprint == (model if adapter is None else f"{adapter}@2")
        usage = reply.usage
        counted = (len(prompt), len(expected.token_ids))
        assert (usage.prompt_tokens, usage.completion_tokens) == counted
        assert usage.total_tokens == sum(counted)


def test_parts_and_developers_say_the_same(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": "it?"}]
    lines = {"role": "user", "content": "what is\nit?"}
    developer = {"role": "developer", "content": "Be brief."}
    expected = ask(client, messages=[system, lines], max_completion_tokens=8, max_tokens=None)
    found = ask(client, messages=[developer, {"role": "user", "content": parts}], max_tokens=8)
    assert found.choices == expected.choices
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens


def test_choices_with_seeds_stops_and_penalties(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 12,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "logit_bias": {"9": -100},
        "stop": ["a", "e"],
    }
    found = ask(client, **fields)
    texts = [choice.message.content for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert not any("a" in text or "e" in text for text in texts)
    assert ask(client, **fields).choices == found.choices
    again = streamed(client, **fields)
    assert [choice.message.content for choice in again.choices] == texts
    reasons = [choice.finish_reason for choice in found.choices]
    assert [choice.finish_reason for choice in again.choices] == reasons
    alone = ask(client, **{**fields, "n": 1, "seed": 6})
    assert alone.choices[0].message.content == texts[1]


def test_logprobs_of_a_chat(server: serving.Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    whole = ask(client, **fields).choices[0]
    tokenizer = server.service.part(ChatSupport).tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(USER)
    (expected,) = server.service.client.executor.generate([prompt], max_new_tokens=6, logprobs=3)
    assert expected.logprobs is not None
    found = whole.logprobs.content
    assert [one.logprob for one in found] == [one.logprob for one in expected.logprobs]
    likeliest = [[logprob for _, logprob in one.top] for one in expected.logprobs]
    assert [[top.logprob for top in one.top_logprobs] for one in found] == likeliest
    assert [one.top_logprobs[0].token for one in found] == [one.token for one in found]
    said = bytes(byte for one in found for byte in one.bytes)
    assert said.decode(errors="replace") == whole.message.content
    parts = [chunk.choices[0].logprobs for chunk in ask(client, stream=True, **fields)]
    assert [one for part in parts if part for one in part.content] == found


def test_usage_in_streams(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(client, max_tokens=3).usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, max_tokens=3, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 3]


def test_json_of_a_schema_is_parsed(client: openai.OpenAI, spaces: dict[str, int]) -> None:
    for seed in range(3):
        fields: dict[str, Any] = {
            "model": serving.MODEL,
            "messages": USER,
            "temperature": 1.0,
            "seed": seed,
            "logit_bias": spaces,
            "max_tokens": 80,
        }
        parsed = client.chat.completions.parse(response_format=Animal, **fields)
        animal = parsed.choices[0].message.parsed
        assert isinstance(animal, Animal)
        assert parsed.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(response_format=Animal, **fields) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == animal


def test_json_objects(client: openai.OpenAI, spaces: dict[str, int]) -> None:
    reply = ask(
        client,
        response_format={"type": "json_object"},
        logit_bias=spaces,
        max_tokens=40,
        extra_body={"bad_words": ['"']},
    )
    assert json.loads(reply.choices[0].message.content) == {}
    reply = ask(client, response_format={"type": "text"}, max_tokens=4)
    assert reply.choices[0].message.content == ask(client, max_tokens=4).choices[0].message.content
    reply = ask(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert reply.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tools_are_called(
    client: openai.OpenAI, spaces: dict[str, int], stream: bool
) -> None:
    create = partial(streamed if stream else ask, logit_bias=spaces)
    named = {"type": "function", "function": {"name": "weather"}}
    reply = create(client, tools=TOOLS, tool_choice=named).choices[0]
    (call,) = reply.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    assert (reply.message.content or "") == ""
    assert reply.finish_reason == "stop"
    assert call.id.startswith("call_")
    reply = create(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name in ("weather", "stop")
    assert reply.choices[0].finish_reason == "tool_calls"
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    reply = create(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert reply.choices[0].message.tool_calls[0].function.name == "stop"
    assert json.loads(reply.choices[0].message.tool_calls[0].function.arguments) == {}


def test_a_stream_of_arguments(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = [
        chunk.choices[0] for chunk in ask(client, tools=TOOLS, tool_choice=named, stream=True)
    ]
    calls = [call for choice in chunks for call in choice.delta.tool_calls or []]
    assert (calls[0].index, calls[0].type, calls[0].function.name) == (0, "function", "weather")
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert len(calls) > 3


def test_tools_of_pydantic_models_are_parsed(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Animal)
    parsed = client.chat.completions.parse(
        model=serving.MODEL,
        messages=USER,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=150,
        temperature=0,
    )
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Animal)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "yes"}
    ask(client, messages=[*USER, parsed.choices[0].message, result], max_tokens=2)


def test_a_tools_result_goes_on(server: serving.Served, client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    message = ask(client, tools=TOOLS, tool_choice=named).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*USER, message.model_dump(), result]
    reply = ask(client, tools=TOOLS, tool_choice="none", messages=messages, max_tokens=2)
    tokenizer = server.service.part(ChatSupport).tokenizer
    assert tokenizer is not None
    function = {"name": "weather", "arguments": json.loads(call.function.arguments)}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    shown = [TOOLS[0], TOOLS[1]]
    prompt = tokenizer.encode_chat([*USER, called, result], tools=shown)
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.choices[0].message.tool_calls is None


def test_an_unguided_output_without_calls_is_content(client: openai.OpenAI) -> None:
    lenient = [TOOLS[1]]
    reply = ask(client, tools=lenient, max_tokens=6).choices[0]
    expected = ask(client, tools=lenient, tool_choice="none", max_tokens=6).choices[0]
    assert reply.message.content == expected.message.content
    strict = ask(client, tools=TOOLS, max_tokens=6).choices[0]
    assert strict.message.tool_calls is None


def test_vllms_extras(server: serving.Served, client: openai.OpenAI) -> None:
    tokenizer = server.service.part(ChatSupport).tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(USER)
    extra: dict[str, Any] = {"return_token_ids": True, "prompt_logprobs": 1, "top_k": 1}
    reply = ask(client, max_tokens=4, extra_body=extra)
    generate = server.service.client.executor.generate
    (expected,) = generate([prompt], max_new_tokens=4, prompt_logprobs=1)
    assert reply.prompt_token_ids == prompt
    assert reply.choices[0].token_ids == list(expected.token_ids)
    assert reply.prompt_logprobs[0] is None
    assert expected.prompt_logprobs is not None
    second = expected.prompt_logprobs[1]
    assert second is not None
    assert reply.prompt_logprobs[1][str(prompt[1])]["logprob"] == second.logprob
    chunks = list(ask(client, max_tokens=4, stream=True, extra_body=extra))
    assert chunks[0].prompt_token_ids == prompt
    ids = [one for chunk in chunks for one in getattr(chunk.choices[0], "token_ids", None) or []]
    assert ids == list(expected.token_ids)
    begun = [*USER, {"role": "assistant", "content": "a dog "}]
    extra = {"continue_final_message": True, "return_token_ids": True}
    reply = ask(client, messages=begun, max_tokens=4, extra_body=extra)
    assert tokenizer.decode(reply.prompt_token_ids, skip_special_tokens=False).endswith("\na dog ")
    extra = {"add_generation_prompt": False, "return_token_ids": True}
    reply = ask(client, max_tokens=4, extra_body=extra)
    assert reply.prompt_token_ids == tokenizer.encode_chat(USER, add_generation_prompt=False)


IMAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
}
NAMED: Any = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": [IMAGE]}, "messages.0.content.0", "'image_url'"),
        ({"messages": [{"role": "user"}]}, "messages", "null or missing"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages.0.content.0",
            "be an object",
        ),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "'system'"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "functions is not supported"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "--trust-request"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, "chat_template_kwargs", "'self'"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 2000}, "max_tokens", "maximum context length is 1024"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice", "'other'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {"type": "string", "format": "unheard-of"},
                    },
                }
            },
            "response_format",
            "unheard-of",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "extra_body": {"structured_outputs": {"regex": "a"}},
            },
            "response_format",
            "together",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "extra_body": {"structured_outputs": {"regex": "a"}},
            },
            "structured_outputs.regex",
            "together",
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
    assert caught.value.type == "invalid_request_error"


def test_options_of_a_stream_need_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="stream=true"):
        ask(client, stream_options={})


def test_other_errors_have_their_classes(server: serving.Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        ask(client, model="other")
    with client_of(server, "no-such-key") as stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger)


def test_without_a_template_or_its_tools(tmp_path: Path) -> None:
    model = tiny_llama.save(tmp_path, max_position_embeddings=1024)
    load = partial(serving.make_executor, directory=model)
    with serving.on_a_port(load) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(client, tools=TOOLS)
        reply = ask(
            client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=110
        )
        assert reply.choices[0].message.tool_calls[0].function.name in ("weather", "stop")

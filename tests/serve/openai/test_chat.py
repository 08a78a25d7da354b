"""Chat completions by OpenAI's own client, and the operator's options of chats."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from pcg.errors import ConfigError
from pcg.serve.openai.tools import ChatSupport
from tests.support import serving, tiny_llama, toy_tokenizers

USER = [{"role": "user", "content": "what is it?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "stop", "description": "Stops."}},
]


class Animal(BaseModel):
    kind: Literal["dog", "fox"]
    is_lazy: bool


def client_of(server, key=serving.KEY):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def spaces(server):
    return serving.white_space(server.service)


def ask(client, **fields):
    asked = {
        "model": serving.MODEL,
        "messages": USER,
        "temperature": 0,
        "max_tokens": 150,
        **fields,
    }
    return client.chat.completions.create(**asked)


def streamed(client, **fields):
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


def test_greedy_text_is_the_librarys(server, client):
    executor, tokenizer = server.service.client.executor, server.service.part(ChatSupport).tokenizer
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    prompt = tokenizer.encode_chat(messages)
    for model, adapter in ((serving.MODEL, None), ("lora-0", "lora-0")):
        (expected,) = executor.generate([prompt], adapter, max_new_tokens=24)
        asked = {"model": model, "messages": messages, "max_tokens": 24}
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


def test_choices_with_seeds_stops_and_penalties(client):
    fields = {
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


def test_logprobs_of_a_chat(server, client):
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    whole = ask(client, **fields).choices[0]
    tokenizer = server.service.part(ChatSupport).tokenizer
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


def test_usage_in_streams(client):
    chunks = list(ask(client, stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(client, max_tokens=3).usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, max_tokens=3, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 3]


def test_json_of_a_schema_is_parsed(client, spaces):
    for seed in range(3):
        fields = {
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


def test_json_objects(client, spaces):
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
def test_forced_tools_are_called(client, spaces, stream):
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


def test_a_stream_of_arguments(client):
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


def test_tools_of_pydantic_models_are_parsed(client):
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
    result = {"role": "tool", "tool_call_id": call.id, "content": "yes"}
    ask(client, messages=[*USER, parsed.choices[0].message, result], max_tokens=2)


def test_a_tools_result_goes_on(server, client):
    named = {"type": "function", "function": {"name": "weather"}}
    message = ask(client, tools=TOOLS, tool_choice=named).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*USER, message.model_dump(), result]
    reply = ask(client, tools=TOOLS, tool_choice="none", messages=messages, max_tokens=2)
    tokenizer = server.service.part(ChatSupport).tokenizer
    function = {"name": "weather", "arguments": json.loads(call.function.arguments)}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    shown = [TOOLS[0], TOOLS[1]]
    prompt = tokenizer.encode_chat([*USER, called, result], tools=shown)
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.choices[0].message.tool_calls is None


def test_vllms_extras(server, client):
    tokenizer = server.service.part(ChatSupport).tokenizer
    prompt = tokenizer.encode_chat(USER)
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "top_k": 1}
    reply = ask(client, max_tokens=4, extra_body=extra)
    generate = server.service.client.executor.generate
    (expected,) = generate([prompt], max_new_tokens=4, prompt_logprobs=1)
    assert reply.prompt_token_ids == prompt
    assert reply.choices[0].token_ids == list(expected.token_ids)
    assert reply.prompt_logprobs[0] is None
    second = expected.prompt_logprobs[1]
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


def test_without_a_template_or_its_tools(tmp_path):
    model = tiny_llama.save(tmp_path, max_position_embeddings=1024)
    load = partial(serving.make_executor, directory=model)
    with serving.on_a_port(load) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(client, tools=TOOLS)
        reply = ask(
            client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=110
        )
        assert reply.choices[0].message.tool_calls[0].function.name in ("weather", "stop")


ASKED = {"model": serving.MODEL, "messages": [{"role": "user", "content": "a dog"}]}
HALF = "\ud800"


def post(service, body, path="/v1/chat/completions"):
    return serving.post(service, path, {**ASKED, **body}).json()


def test_a_trusted_template_makes_the_prompt():
    with serving.service_of(trust_request_chat_template=True) as service:
        body = {"chat_template": "{{ x }}: {{ messages[0].content }}", "max_tokens": 2}
        variables = {"chat_template_kwargs": {"x": "it is"}}
        reply = post(service, {**body, **variables, "return_token_ids": True})
        tokenizer = service.client.executor.tokenizer
        assert tokenizer.decode(reply["prompt_token_ids"]) == "it is: a dog"
        for template in (
            "{{ messages[",
            "{{ messages[0].content.__class__.__mro__ }}",
            "{{ 1/0 }}",
        ):
            error = post(service, {**body, "chat_template": template})["error"]
            assert error["type"] == "invalid_request_error"
            assert "template" in error["message"]


def test_without_a_bound_outputs_fit_into_the_pages(tmp_path):
    model = tiny_llama.save(tmp_path, max_position_embeddings=1024)
    executor = serving.make_executor(directory=model)
    with serving.service_of(executor, kv_cache_gib=1 / 2**14) as service:
        pages = service.client.engine.numbers().pages
        assert pages * 16 < 1024
        for name in (serving.MODEL, "lora-0"):
            reply = post(service, {"model": name, "ignore_eos": True, "temperature": 0})
            adapter = None if name == serving.MODEL else executor.adapters[name]
            assert reply["usage"]["total_tokens"] == service.client.engine.most_tokens(adapter)
        short = {"truncate_prompt_tokens": 3, "ignore_eos": True}
        assert post(service, short)["usage"]["total_tokens"] == pages * 16 + 1


def test_half_characters_are_shown_as_such(service):
    item = {"role": "user", "content": "a", "id": HALF}
    repeated = {"metadata": {"a": HALF}, "max_tool_calls": 10**30, "max_output_tokens": 2}
    body = {"model": serving.MODEL, "input": [item], **repeated}
    reply = serving.post(service, "/v1/responses", body).json()
    assert (reply["metadata"], reply["max_tool_calls"]) == ({"a": HALF}, 10**30)
    path = f"/v1/responses/{reply['id']}"
    assert get(service, path) == reply
    assert get(service, f"{path}/input_items")["data"][0]["id"] == HALF


def get(service, path):
    return serving.ask(service, "GET", path).json()


def test_models_without_a_template_or_a_tokenizer(tmp_path):
    with serving.service_of() as service:
        tokenizer = service.client.executor.tokenizer
        assert tokenizer is not None
        for missing, code in (
            (replace(tokenizer, chat_template=None), "no_chat_template"),
            (None, "no_tokenizer"),
        ):
            service.add(ChatSupport(missing))
            assert post(service, {})["error"]["code"] == code
    with pytest.raises(ConfigError, match="chat template"):
        ChatSupport(tokenizer, chat_template=written(tmp_path, "{% if %}"))
    with pytest.raises(ConfigError, match="nowhere"):
        ChatSupport(tokenizer, chat_template=tmp_path / "nowhere")


def written(folder, template):
    path = folder / "template.jinja"
    path.write_text(template)
    return path


def test_developers_keep_their_role_where_a_template_has_it():
    has_it = toy_tokenizers.CHATML + "{# developer #}"
    with serving.service_of() as service:
        tokenizer = service.client.executor.tokenizer
        messages = [{"role": "developer", "content": "Be brief."}]
        counts = {}
        for template in (toy_tokenizers.CHATML, has_it):
            service.add(ChatSupport(tokenizer.with_template(template)))
            asked = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
            counts[template] = tokenizer.decode(
                post(service, asked)["prompt_token_ids"], skip_special_tokens=False
            )
        assert "system" in counts[toy_tokenizers.CHATML]
        assert "developer" in counts[has_it]

"""The operator's options of chats, and requests that try what has no bound of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import ConfigError
from pcg.serve.http.service import Service
from pcg.serve.openai.tools import ChatSupport
from tests.support import chat_templates, serving, tiny_llama, toy_tokenizers

USER = {"model": serving.MODEL, "messages": [{"role": "user", "content": "a dog"}]}
HALF = "\ud800"
JSON = {"content-type": "application/json"}


def post(service: Service, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> Any:
    return serving.post(service, path, {**USER, **body}).json()


def test_a_trusted_template_makes_the_prompt() -> None:
    with serving.service_of(trust_request_chat_template=True) as service:
        body = {"chat_template": "{{ x }}: {{ messages[0].content }}", "max_tokens": 2}
        variables = {"chat_template_kwargs": {"x": "it is"}}
        reply = post(service, {**body, **variables, "return_token_ids": True})
        tokenizer = service.client.executor.tokenizer
        assert tokenizer is not None
        assert tokenizer.decode(reply["prompt_token_ids"]) == "it is: a dog"
        for template in (
            "{{ messages[",
            "{{ messages[0].content.__class__.__mro__ }}",
            "{{ 1/0 }}",
        ):
            error = post(service, {**body, "chat_template": template})["error"]
            assert error["type"] == "invalid_request_error"
            assert "template" in error["message"]


def test_without_a_bound_outputs_fit_into_the_pages(tmp_path: Path) -> None:
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


def test_half_characters_are_refused_or_shown_as_such(tmp_path: Path) -> None:
    with serving.service_of() as service:
        bodies: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": HALF}]},
            {"messages": [{"role": "user", "content": [{"type": HALF}]}]},
            {"model": HALF},
            {HALF: 1},
        ]
        for body in bodies:
            assert post(service, body)["error"]["type"] == "invalid_request_error"
        refused: list[dict[str, Any]] = [
            {"input": HALF},
            {"input": [{"type": HALF}]},
            {"input": "a", "instructions": HALF},
            {"input": "a", "previous_response_id": HALF},
        ]
        for body in refused:
            error = of_responses(service, {"model": serving.MODEL, **body})["error"]
            assert error["type"] == "invalid_request_error", body
        item = {"role": "user", "content": "a", "id": HALF}
        repeated = {"metadata": {"a": HALF}, "max_tool_calls": 10**30, "max_output_tokens": 2}
        reply = of_responses(service, {"model": serving.MODEL, "input": [item], **repeated})
        assert (reply["metadata"], reply["max_tool_calls"]) == ({"a": HALF}, 10**30)
        path = f"/v1/responses/{reply['id']}"
        assert get(service, path) == reply
        assert get(service, f"{path}/input_items")["data"][0]["id"] == HALF


def get(service: Service, path: str) -> Any:
    return serving.ask(service, "GET", path).json()


def of_responses(service: Service, body: Mapping[str, Any]) -> Any:
    return serving.post(service, "/v1/responses", body).json()


def test_a_schema_that_cannot_be_followed_is_named(tmp_path: Path) -> None:
    template = tmp_path / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    function = {"name": "f", "parameters": {"type": "string", "format": "unheard-of"}}
    body = {"tools": [{"type": "function", "function": {**function, "strict": True}}]}
    with serving.service_of(chat_template=template) as service:
        for choice in ("auto", "required"):
            error = post(service, {**body, "tool_choice": choice, "max_tokens": 2})["error"]
            assert error["param"] == "tools"
            said = "The schemas of the tools cannot be followed: Unknown format: unheard-of"
            assert error["message"] == said


def test_models_without_a_template_or_a_tokenizer(tmp_path: Path) -> None:
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


def written(folder: Path, template: str) -> Path:
    path = folder / "template.jinja"
    path.write_text(template)
    return path


def test_developers_keep_their_role_where_a_template_has_it() -> None:
    has_it = toy_tokenizers.CHATML + "{# developer #}"
    with serving.service_of() as service:
        tokenizer = service.client.executor.tokenizer
        assert tokenizer is not None
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

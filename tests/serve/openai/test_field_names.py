"""Errors name the field that the client sent, whatever the engine calls it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pcg.errors import GenerationError
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import Service
from pcg.serve.openai.wire import FieldNames
from tests.support import chat_templates, serving

USER = [{"role": "user", "content": "a"}]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": USER},
    RESPONSES: {"input": "a"},
    "/v1/embeddings": {"input": "a"},
}
UNKNOWN = {"type": "string", "format": "unheard-of"}
SCHEMA = {"name": "a", "schema": UNKNOWN}
FORMAT = {"type": "json_schema", "json_schema": SCHEMA}
STRICT = {"name": "f", "parameters": UNKNOWN, "strict": True}
HALF = "\ud800"
FOREIGN = ("guided_", "max_new_tokens", "slo_s")
"""Words of the engine, which are in no message unless the client sent them."""

EVERYWHERE: list[tuple[str, Any]] = [
    ("stop", [""]),
    ("stop", ["a"] * 200),
    ("stop", "a" * 2000),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"5": math.nan}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**70]),
    ("allowed_token_ids", []),
    ("bad_words", ["a" * 5000]),
    ("bad_words", [HALF]),
    ("temperature", math.inf),
    ("top_p", math.nan),
    ("top_k", -2),
    ("n", 0),
    ("ttft_slo_ms", math.inf),
    ("structured_outputs.json", UNKNOWN),
    ("structured_outputs.json", "{"),
    ("structured_outputs.json", "[]"),
    ("structured_outputs.regex", "("),
    ("structured_outputs.choice", [""]),
    ("structured_outputs.choice", []),
    ("structured_outputs.grammar", "x"),
    ("guided_json", UNKNOWN),
    ("guided_choice", []),
]
OWN: list[tuple[str, str, Any, dict[str, Any]]] = [
    (COMPLETIONS, "prompt", [99999], {}),
    (COMPLETIONS, "prompt", HALF, {}),
    (COMPLETIONS, "prompt", ["a", ""], {}),
    (COMPLETIONS, "prompt", [1] * 200, {}),
    (COMPLETIONS, "max_tokens", 10**6, {}),
    (COMPLETIONS, "min_tokens", 5, {"max_tokens": 3}),
    (COMPLETIONS, "logprobs", 21, {}),
    (COMPLETIONS, "response_format", FORMAT, {}),
    (COMPLETIONS, "response_format", FORMAT, {"guided_json": {}}),
    (CHAT, "messages", [{"role": "user", "content": "a" * 500}], {}),
    (CHAT, "messages", [{"role": "user", "content": HALF}], {}),
    (CHAT, "max_tokens", 10**6, {}),
    (CHAT, "max_completion_tokens", 10**6, {}),
    (CHAT, "min_tokens", 5, {"max_completion_tokens": 3}),
    (CHAT, "top_logprobs", 21, {"logprobs": True}),
    (CHAT, "response_format", FORMAT, {}),
    (CHAT, "tools", [{"type": "function", "function": STRICT}], {}),
    (RESPONSES, "input", "a" * 500, {}),
    (RESPONSES, "max_output_tokens", 10**6, {}),
    (RESPONSES, "min_tokens", 5, {"max_output_tokens": 3}),
    (RESPONSES, "top_logprobs", 21, {"include": ["message.output_text.logprobs"]}),
    (RESPONSES, "text.format", {"type": "json_schema", **SCHEMA}, {}),
    (RESPONSES, "text.format", {"type": "json_object"}, {"guided_regex": "a"}),
    (RESPONSES, "tools", [{"type": "function", **STRICT}], {}),
    ("/v1/embeddings", "input", [99999], {}),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    with serving.service_of(chat_template=template) as service:
        yield service


def refused(service: Service, path: str, field: str, value: Any, further: Any = None) -> str:
    """The message of the error, which is of that field."""
    name, _, part = field.partition(".")
    body = {**BODIES[path], **(further or {}), name: {part: value} if part else value}
    reply = serving.post(service, path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field, error
    sent = str(body)
    assert not [word for word in FOREIGN if word in error["message"] and word not in sent], error
    return str(error["message"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_fields_of_all_routes(service: Service, path: str) -> None:
    for field, value in EVERYWHERE:
        assert field in refused(service, path, field, value)


@pytest.mark.parametrize(
    ("path", "field", "value", "further"), OWN, ids=[f"{p[4:]}-{f}" for p, f, _, _ in OWN]
)
def test_fields_that_routes_have_their_own_names_of(
    service: Service, path: str, field: str, value: Any, further: dict[str, Any]
) -> None:
    refused(service, path, field, value, further)


def test_messages_tell_the_limit_by_the_clients_name(service: Service) -> None:
    for path, name in ((CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")):
        said = refused(service, path, "min_tokens", 5, {name: 3})
        assert said.endswith(f"which is {name}=3")
    both = {"response_format": FORMAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    error = serving.post(service, CHAT, {**BODIES[CHAT], **both}).json()["error"]
    expected = "The schemas of the tools and of response_format cannot be followed: Unknown format"
    assert error["message"].startswith(expected)


def test_slos_that_cannot_be_kept_are_told_in_milliseconds() -> None:
    with serving.service_of() as service:
        engine = service.client.engine
        slow = Latencies(Latency(0.25, 1e-6, 0.0), Latency(0.25, 1e-6, 0.0))
        engine.run(lambda: engine.engine.learn(slow))
        for path in (COMPLETIONS, CHAT, RESPONSES):
            for field in ("ttft_slo_ms", "tpot_slo_ms"):
                said = refused(service, path, field, 12.5)
                assert said.startswith(f"{field}=12.5 of "), said
                assert "0.25 s; ask for more" in said


def test_numbers_of_hundreds_of_digits_are_cut(service: Service) -> None:
    huge = 10**300
    asked: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"max_tokens": huge}),
        (COMPLETIONS, {"logprobs": huge}),
        (COMPLETIONS, {"min_tokens": huge}),
        (COMPLETIONS, {"prompt": [huge]}),
        (COMPLETIONS, {"stop_token_ids": [huge]}),
        (CHAT, {"max_tokens": huge, "max_completion_tokens": huge + 1}),
        (RESPONSES, {"max_output_tokens": huge}),
        ("/detokenize", {"tokens": [huge]}),
    ]
    for path, body in asked:
        reply = serving.post(service, path, {**BODIES.get(path, {}), **body})
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert "10000000" in message, body
        assert not re.search(r"\d{32}", message), message


def test_values_stay_as_they_were_sent() -> None:
    names = FieldNames("prompt", {"max_new_tokens": "max_tokens", "stop": "end"})
    message = "stop=('max_new_tokens \\' stop',) has the model's stop: max_new_tokens=3"
    error = names.named(GenerationError(message))
    assert isinstance(error, ApiError)
    expected = "end=('max_new_tokens \\' stop',) has the model's end: max_tokens=3"
    assert (error.detail, error.param) == (expected, "end")
    other = ValueError("stop=1")
    assert names.named(other) is other

"""Bodies that no route takes: each error has its status, names the field as sent, and says why.

Clients read the same error where they asked for a stream. How the classes of other people's clients
are raised is tested with those clients; that every field of every schema is named when its value is
wrong, in tests/serve/test_app.py.
"""

import math
import re

import pytest

from pcg.errors import GenerationError
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.serve.http.errors import ApiError
from pcg.serve.openai.wire import FieldNames
from tests.support import chat_templates, serving

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/score", "/rerank"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BODIES = {
    COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]},
    RESPONSES: {"input": "a"}, EMBEDDINGS: {"input": "a"}, SCORE: {}, RERANK: {"query": "a"},
    TOKENIZE: {}, DETOKENIZE: {},
}  # fmt: skip
STREAMS = (COMPLETIONS, CHAT, RESPONSES)
FOREIGN = ("max_new_tokens", "slo_s")
"""Words of the engine, which are in no message unless the client sent them."""
HALF = "\ud800"
UNKNOWN = {"type": "string", "format": "unheard-of"}
STRICT = {"name": "f", "parameters": UNKNOWN, "strict": True}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "a"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}
TALK = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a dog"}]
BOTH = {"continue_final_message": True, "add_generation_prompt": True}


def said(*content, role="user"):
    return [{"role": role, **({"content": content[0]} if content else {})}]


def of_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def outputs(**options):
    return {"structured_outputs": options}


# Rows: fields of a body, the parameter that the error names ("*" for any), words of its message.
EVERYWHERE = [
    ({"stop": [""]}, "stop", "stop"),
    ({"stop": ["a"] * 200}, "stop", "128"),
    ({"stop": "a" * 2000}, "stop", "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias", "100"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias"),
    ({"logit_bias": {"5": math.nan}}, "logit_bias", "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids", "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids"),
    ({"bad_words": ["a" * 5000]}, "bad_words", "bad_words"),
    ({"bad_words": [HALF]}, "bad_words", "bad_words"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": math.inf}, "temperature", "temperature"),
    ({"top_p": math.nan}, "top_p", "top_p"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"n": 0}, "n", "n"),
    ({"ttft_slo_ms": math.inf}, "ttft_slo_ms", "ttft_slo_ms"),
    ({"tpot_slo_ms": 0}, "tpot_slo_ms", "greater than"),
    ({"request_id": HALF}, "request_id", ""),
    ({"request_id": "x" * 129}, "request_id", "128"),
    ({"request_id": "a\nb"}, "request_id", "pattern"),
    ({"request_id": "a\x1b[2J"}, "request_id", "pattern"),
    ({"request_id": "a\u202eb"}, "request_id", "pattern"),
    ({HALF: 1}, None, "unpaired surrogate"),
    (outputs(), "structured_outputs", "no constraint"),
    (outputs(json=UNKNOWN), "structured_outputs.json", "structured_outputs.json"),
    (outputs(json={"type": "nothing"}), "structured_outputs.json", ""),
    (outputs(json={"const": HALF}), "structured_outputs.json", ""),
    (outputs(json="{"), "structured_outputs.json", "structured_outputs.json"),
    (outputs(json="[]"), "structured_outputs.json", "structured_outputs.json"),
    (outputs(regex="("), "structured_outputs.regex", "structured_outputs.regex"),
    (outputs(choice=[""]), "structured_outputs.choice", "structured_outputs.choice"),
    (outputs(choice=[]), "structured_outputs.choice", "structured_outputs.choice"),
    (outputs(grammar="x"), "structured_outputs.grammar", "structured_outputs.grammar"),
    ({"guided_json": UNKNOWN}, "guided_json", "guided_json"),
    ({"guided_choice": []}, "guided_choice", "guided_choice"),
    ({**outputs(regex="a"), "guided_regex": "b"}, "guided_regex", "together"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "option of JSON"),
]
OWN = {
    COMPLETIONS: [
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"stream_options": {}, "stream": False}, "stream_options", "stream=true"),
        ({"n": 3, "best_of": 2, "stream": False}, "best_of", "below n=3"),
        ({"best_of": 2, "n": 10**300}, "n", "128"),
        ({"best_of": 2, "stream": True}, "best_of", "streamed"),
        ({"max_tokens": 128}, "max_tokens", "maximum context length is 128 tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens=3"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"prompt": [512]}, "prompt", "prompt 0 has token 512"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [2**70]}, "prompt", ""),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": ["a"] * 100, "n": 128}, "prompt", "12800 sequences"),
        ({"prompt": ["a", ""]}, "prompt", "prompt 1 is empty"),
        ({"prompt": ["a", [1]]}, "prompt", ""),
        ({"prompt": None}, "prompt", ""),
        ({"prompt": [1] * 200}, "prompt", "maximum context length"),
        ({"prompt": HALF}, "prompt", "surrogate"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
        ({"truncate_prompt_tokens": -1, "max_tokens": 200}, "max_tokens", "is 128 tokens"),
        ({"ttft_slo_ms": 1e-300}, "ttft_slo_ms", "greater"),
        ({"response_format": of_schema(UNKNOWN)}, "response_format", "unheard-of"),
        ({"response_format": of_schema(UNKNOWN), "guided_json": {}}, "response_format", "together"),
        ({"response_format": of_schema({"items": {"x-guidance": {}}})}, "response_format",
         "x-guidance is within the schema"),
        ({"response_format": of_schema({"x-guidance": {"lenient": True}})}, "response_format",
         "x-guidance has lenient=true"),
        (outputs(json={"x-guidance": 5}, disable_any_whitespace=True), "structured_outputs.json",
         "x-guidance=5; use an object"),
        (outputs(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern",
         "option of JSON"),
        (outputs(json={}, whitespace_pattern="( "), "structured_outputs.json", "unclosed group"),
        ({**outputs(json={}, disable_any_whitespace=True), "guided_whitespace_pattern": " "},
         "guided_whitespace_pattern", "together"),
    ],
    CHAT: [
        ({"messages": said([IMAGE])}, "messages.0.content.0", "'image_url'"),
        ({"messages": said()}, "messages", "null or missing"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": said(5)}, "messages.0.content", "valid string"),
        ({"messages": said([5])}, "messages.0.content.0", "be an object"),
        ({"messages": said("a", role="robot")}, "messages.0.role", "'system'"),
        ({"messages": said("a" * 500)}, "messages", "maximum context length"),
        ({"messages": said(HALF)}, "messages", ""),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 10**6}, "max_tokens", "maximum context length is 128"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "maximum context length"),
        ({"min_tokens": 5, "max_completion_tokens": 3}, "min_tokens",
         "which is max_completion_tokens=3"),
        ({"stream_options": {}, "stream": False}, "stream_options", "stream=true"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice", "'other'"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": STRICT}]}, "tools",
         "The schemas of the tools cannot be followed: Unknown format: unheard-of"),
        ({"tools": [TOOL], "tool_choice": "required", **outputs(regex="a")},
         "structured_outputs.regex", "together"),
        ({"tools": [TOOL], "response_format": of_schema(UNKNOWN)}, "tools",
         "The schemas of the tools and of response_format cannot be followed: Unknown format"),
        ({"response_format": of_schema(UNKNOWN)}, "response_format", "unheard-of"),
        ({"response_format": {"type": "json_object"}, **outputs(regex="a")}, "response_format",
         "together"),
    ],
    RESPONSES: [
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "a"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", '"disabled"'),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", **STRICT}]}, "tools", "unheard-of"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "valid string"),
        ({"input": [5]}, "input.0", "be an object"),
        ({"input": HALF}, "input", ""),
        ({"input": [{"type": HALF}]}, "input.0", ""),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "'item_reference'"),
        ({"input": said()}, "input[0].content", "Missing"),
        ({"input": [{**said("a")[0], "color": 1}]}, None, "input[0].color"),
        ({"input": said([INPUT_IMAGE])}, "input[0].content[0]", "'input_image'"),
        ({"input": [CALL]}, "messages", "arguments"),
        ({"input": "a" * 500}, "input", "maximum context length"),
        ({"instructions": HALF}, "input", "surrogate"),
        ({"previous_response_id": HALF}, "previous_response_id", ""),
        ({"n": 2}, "n", "not supported"),
        ({"max_tokens": 2}, "max_tokens", "Unrecognized"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "maximum context length"),
        ({"min_tokens": 5, "max_output_tokens": 3}, "min_tokens", "which is max_output_tokens=3"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": UNKNOWN}}},
         "text.format", "unheard-of"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format",
         "together"),
    ],
    EMBEDDINGS: [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "text"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": ["a", [1]]}, "input", "token ids"),
        ({"input": [[1], []]}, "input", "token ids"),
        ({"input": [10**9]}, "input", "1000000000"),
        ({"input": "a" * 4000}, "input", "maximum context length"),
        ({"encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"dimensions": 0}, "dimensions", "dimensions"),
        ({"pooling": "max"}, "pooling", "pooling"),
        ({"temperature": 1.0}, "temperature", "temperature"),
    ],
    SCORE: [
        ({"queries": ["a", "b"], "documents": ["a"]}, "*", "queries has 2 texts"),
        ({"queries": "a"}, "*", "two sides"),
        ({"queries": "a", "text_2": "b"}, "*", "two sides"),
        ({"text_1": "a", "text_2": []}, "text_2", "text_2"),
        ({"text_1": "a", "text_2": "b " * 500}, "*", "maximum context length"),
        ({"text_1": "a", "text_2": ["b", HALF]}, "*", "text_2"),
        ({"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "instruction is not"),
    ],
    RERANK: [
        ({"documents": ["b"], "top_n": -1}, "top_n", "top_n"),
        ({"documents": ["b " * 500]}, "*", "maximum context length"),
        ({"documents": ["b"], "return_documents": False}, "return_documents", "return_doc"),
        ({"documents": []}, "documents", "at least 1 item, not 0"),
        ({"documents": ["a"] * 5000}, "documents", "at most 4096 items, not 5000"),
        ({"documents": ["a", ""]}, "documents.1", "at least 1 character"),
        ({"documents": ["a", 5]}, "documents.1", "a valid string"),
        ({"documents": [{"text": "a"}]}, "documents.0", "a valid string"),
        ({"documents": ""}, "documents", "at least 1 character"),
        ({"documents": 5}, "documents", "a valid string"),
    ],
    TOKENIZE: [
        ({}, "*", "prompt"),
        ({"prompt": "a", "messages": TALK}, "*", "prompt"),
        ({"prompt": ["a"]}, "prompt", "prompt"),
        ({"prompt": HALF}, "*", "surrogate"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": said("a", role="wizard")}, "messages.0.role", "role"),
        ({"messages": TALK, "tools": [{"type": "magic"}]}, "tools.0.type", "tools"),
        ({"messages": TALK, **BOTH}, "*", "continue_final_message"),
        ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "*", "messages"),
        ({"messages": TALK, "chat_template_kwargs": {"self": 1}}, "*", "self"),
        ({"messages": TALK, "chat_template_kwargs": {"tools": 1}}, "*", "tools"),
        ({"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template", "chat_template"),
    ],
    DETOKENIZE: [
        ({"tokens": [2**40]}, "*", str(2**40)),
        ({"tokens": [-1]}, "tokens.0", "tokens"),
        ({"tokens": [True]}, "tokens.0", "tokens"),
    ],
}  # fmt: skip
ROWS = [(path, row) for path in STREAMS for row in EVERYWHERE]
ROWS += [(path, row) for path, rows in OWN.items() for row in rows]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    with serving.service_of(chat_template=template) as service:
        yield service


def refused(service, path, fields):
    """The error of a body, which is that of the same body where a stream is asked for."""
    body = {**BODIES[path], **fields}
    found = []
    for more in ({}, {"stream": True}) if path in STREAMS and "stream" not in body else ({},):
        reply = serving.post(service, path, {**body, **more})
        assert reply.status_code == 400, reply.text
        found.append(reply.json()["error"])
    assert found[0] == found[-1]
    return found[0]


def name_of(row):
    return f"{row[0].strip('/').removeprefix('v1/')}-{row[1][1]}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_what_cannot_be_is_refused_by_name(service, row):
    path, (fields, param, words) = row
    error = refused(service, path, fields)
    assert words in error["message"]
    assert param in (error["param"], "*"), error
    assert error["type"] == "invalid_request_error"
    sent = str(fields)
    assert not [word for word in FOREIGN if word in error["message"] and word not in sent], error


def test_models_and_fields_that_are_not_there(service):
    for model in ("other", HALF):
        for path in (COMPLETIONS, CHAT, RESPONSES, EMBEDDINGS, TOKENIZE):
            body = {"prompt": "a"} if path == TOKENIZE else BODIES[path]
            reply = serving.post(service, path, {**body, "model": model})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"], error["code"]) == (
                404, "model", "model_not_found",
            )  # fmt: skip
            assert model == HALF or error["message"] == "The model `other` does not exist."
    error = refused(service, COMPLETIONS, {"maxtokens": 3})
    assert error["message"] == "Unrecognized request argument supplied: maxtokens"


def test_slos_that_cannot_be_kept_are_told_in_milliseconds():
    with serving.service_of() as service:
        engine = service.client.engine
        slow = Latencies(Latency(0.25, 1e-6, 0.0), Latency(0.25, 1e-6, 0.0))
        engine.run(lambda: engine.engine.learn(slow))
        for path in STREAMS:
            for field in ("ttft_slo_ms", "tpot_slo_ms"):
                reply = serving.post(service, path, {**BODIES[path], field: 12.5})
                error = reply.json()["error"]
                assert error["param"] == field
                assert error["message"].startswith(f"{field}=12.5 of "), error
                assert "0.25 s; ask for more" in error["message"]


def test_numbers_of_hundreds_of_digits_are_cut(service):
    huge = 10**300
    asked = [
        (COMPLETIONS, {"max_tokens": huge}),
        (COMPLETIONS, {"logprobs": huge}),
        (COMPLETIONS, {"min_tokens": huge}),
        (COMPLETIONS, {"prompt": [huge]}),
        (COMPLETIONS, {"stop_token_ids": [huge]}),
        (CHAT, {"max_tokens": huge, "max_completion_tokens": huge + 1}),
        (RESPONSES, {"max_output_tokens": huge}),
        (DETOKENIZE, {"tokens": [huge]}),
    ]
    for path, fields in asked:
        message = refused(service, path, fields)["message"]
        assert "10000000" in message, fields
        assert not re.search(r"\d{32}", message), message


def test_values_stay_as_they_were_sent():
    names = FieldNames("prompt", {"max_new_tokens": "max_tokens", "stop": "end"})
    message = "stop=('max_new_tokens \\' stop',) has the model's stop: max_new_tokens=3"
    error = names.named(GenerationError(message))
    assert isinstance(error, ApiError)
    expected = "end=('max_new_tokens \\' stop',) has the model's end: max_tokens=3"
    assert (error.detail, error.param) == (expected, "end")
    other = ValueError("stop=1")
    assert names.named(other) is other

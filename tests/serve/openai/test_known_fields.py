"""The fields of OpenAI's and vLLM's bodies: null and values that change nothing are taken.

What would change the answer, and is not supported, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai.types import completion_create_params as completion
from openai.types import embedding_create_params as embedding
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as response

from tests.support import serving

USER = [{"role": "user", "content": "a"}]
OF_VLLM = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
    priority prompt_logprobs repetition_detection repetition_penalty request_id
    return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens
    stop_token_ids stream stream_interval structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""
"""The fields that vLLM's completions and chats have in common beside OpenAI's."""


@dataclass(frozen=True)
class Route:
    """The fields of one route.

    Attributes:
        body: what it needs.
        known: the fields of OpenAI's client and of vLLM.
        same: values that say what is done without them.
        refused: values that would change the answer.
    """

    path: str
    body: Mapping[str, Any]
    known: frozenset[str]
    same: Mapping[str, Any]
    refused: Mapping[str, Any] = field(default_factory=dict)


def names(params, of_vllm):
    return frozenset(params.__annotations__) | frozenset(of_vllm.split())


SAME = {
    "allowed_token_ids": None, "bad_words": [], "early_stopping": False, "frequency_penalty": 0,
    "ignore_eos": False, "include_stop_str_in_output": False, "length_penalty": 1.0,
    "logit_bias": {}, "logits_processors": [], "min_p": 0.0, "min_tokens": 0, "n": 1,
    "presence_penalty": 0.0, "priority": 0, "repetition_penalty": 1.0, "return_mm_kwargs": True,
    "return_token_ids": False, "return_token_offsets": False, "return_tokens_as_token_ids": False,
    "routed_experts_prompt_start": 0, "session_id": "s", "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "stop": [], "stop_token_ids": [], "stream": False,
    "stream_interval": 1, "thinking_token_budget": -1, "top_k": -1, "top_p": 1,
    "truncation_side": "left", "use_beam_search": False, "user": "u", "vllm_xargs": {},
    "watermarking": False,
}  # fmt: skip
REFUSED = {
    "early_stopping": True, "ec_transfer_params": {}, "guided_decoding_backend": "xgrammar",
    "guided_whitespace_pattern": " ", "kv_transfer_params": {"a": 1}, "length_penalty": 1.5,
    "logits_processors": ["a"], "logprob_token_ids": [1], "mm_processor_kwargs": {},
    "repetition_detection": {}, "return_mm_kwargs": False, "return_token_offsets": True,
    "routed_experts_prompt_start": 1, "session_id": 1, "spaces_between_special_tokens": False,
    "stream_interval": 2, "thinking_token_budget": 5, "truncation_side": "right",
    "use_beam_search": True, "vllm_xargs": {"a": 1}, "watermarking": True,
}  # fmt: skip
OF_REQUESTS = {
    "metadata": {"a": "b"}, "parallel_tool_calls": True, "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "safety_identifier": "p", "service_tier": "auto",
    "store": False, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
}  # fmt: skip
ROUTES = [
    Route(
        "/v1/completions",
        {"prompt": "a", "max_tokens": 5, "temperature": 0},
        names(completion.CompletionCreateParamsBase, f"{OF_VLLM} prompt_embeds response_format"),
        {**SAME, "add_special_tokens": True, "best_of": 1, "echo": False, "suffix": "",
         "response_format": {"type": "text"}},
        {**REFUSED, "prompt_embeds": "AAAA", "suffix": "b"},
    ),
    Route(
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 5, "temperature": 0},
        names(
            chat.CompletionCreateParamsBase,
            f"""{OF_VLLM} add_generation_prompt chat_template chat_template_kwargs
            continue_final_message documents echo include_reasoning media_io_kwargs
            mm_processor_kwargs return_prompt_text""",
        ),
        {**SAME, **OF_REQUESTS, "add_generation_prompt": True, "chat_template_kwargs": {},
         "continue_final_message": False, "echo": False, "function_call": "none", "functions": [],
         "include_reasoning": True, "logprobs": False, "modalities": ["text"],
         "response_format": {"type": "text"}, "return_prompt_text": False, "verbosity": "medium"},
        {**REFUSED, "audio": {}, "echo": True, "function_call": "auto", "functions": [{}],
         "include_reasoning": False, "media_io_kwargs": {}, "modalities": ["audio"],
         "moderation": {}, "return_prompt_text": True, "web_search_options": {}},
    ),
    Route(
        "/v1/responses",
        {"input": "a", "max_output_tokens": 5, "temperature": 0},
        names(
            response.ResponseCreateParamsBase,
            """cache_salt enable_response_messages ignore_eos include_stop_str_in_output logit_bias
            mm_processor_kwargs previous_input_messages previous_response priority
            repetition_penalty request_id seed skip_special_tokens stop stream structured_outputs
            top_k vllm_xargs""",
        ),
        {**SAME, **OF_REQUESTS, "background": False, "context_management": [],
         "enable_response_messages": False, "include": [], "reasoning": {},
         "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled"},
        {**REFUSED, "access_programs": {}, "background": True, "background_options": {},
         "context_management": [{}], "conversation": "c", "enable_response_messages": True,
         "image": {}, "moderation": {}, "n": 2, "previous_input_messages": [],
         "previous_response": {}, "prompt": {"id": "p"}, "prompt_logprobs": 0,
         "return_token_ids": True, "truncation": "auto"},
    ),
    Route(
        "/v1/embeddings",
        {"input": "a"},
        names(
            embedding.EmbeddingCreateParams,
            """add_special_tokens cache_salt embed_dtype endianness mm_processor_kwargs normalize
            priority request_id session_id truncate_prompt_tokens truncation_side use_activation""",
        ),
        {"add_special_tokens": True, "embed_dtype": "float32", "encoding_format": "float",
         "endianness": "native", "normalize": True, "priority": 0, "request_id": "r",
         "session_id": "s", "truncation_side": "left", "use_activation": True, "user": "u"},
        {"embed_dtype": "float16", "endianness": "big", "mm_processor_kwargs": {},
         "truncation_side": "right", "use_activation": False},
    ),
]  # fmt: skip


def answer(service, route, fields):
    """The part of a reply that the fields could change."""
    reply = serving.post(service, route.path, {**route.body, **fields})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    if "choices" in found:
        return [{**one, "index": 0} for one in found["choices"]]
    return found["data"] if "data" in found else found["output"][0]["content"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path[4:])
def test_null_and_values_that_change_nothing_are_taken(service, route):
    expected = answer(service, route, {"model": serving.MODEL})
    assert answer(service, route, dict.fromkeys(route.known - route.body.keys())) == expected
    assert answer(service, route, route.same) == expected


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path[4:])
def test_values_that_would_change_the_answer_are_refused(service, route):
    for name, value in route.refused.items():
        reply = serving.post(service, route.path, {**route.body, name: value})
        assert reply.status_code == 400, (name, value)
        error = reply.json()["error"]
        assert name in (error["param"] or "").split("."), error
        assert name in error["message"], error

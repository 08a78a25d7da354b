"""The response object."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel

from pcg.runtime.requests.request import Completion
from pcg.serve.openai.responses.body import ResponseBody
from pcg.serve.openai.sampling_fields import SamplingDefaults


class ResponseReply(BaseModel):
    """A response; items of its output are messages and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    system_fingerprint: str


def begun_response(
    response_id: str, model: str, body: ResponseBody, defaults: SamplingDefaults
) -> dict[str, Any]:
    """Return the response object of a request that has begun."""
    temperature, top_p = (body.given(name, defaults) for name in ("temperature", "top_p"))
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    choice = body.tool_choice
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if temperature is None else temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [_tool(tool.model_dump()) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if top_p is None else top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "parameters": tool["parameters"] or {}, "strict": bool(tool["strict"])}


def status_of(done: Completion) -> str:
    """Return the status of a response and its last item."""
    return "incomplete" if done.finish_reason == "length" else "completed"


def ended_response(
    response: dict[str, Any], items: list[dict[str, Any]], done: Completion
) -> dict[str, Any]:
    """Return a response with its output."""
    status = status_of(done)
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        **response,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": reason,
        "output": items,
        "usage": _usage(done),
    }


def _usage(done: Completion) -> dict[str, Any]:
    output = len(done.token_ids)
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + output,
    }

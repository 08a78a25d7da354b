"""Replies of POST /v1/responses.

The output of a response: items, and the events that tell of them as they come.

The response object.

The events of a streamed response.

    event: response.created             data: {"type", "sequence_number", "response"}
    event: response.in_progress
    event: response.output_item.added   …of each item, with its parts and deltas between
    event: response.output_item.done
    event: response.completed           or response.incomplete; response.failed after an error

Every event has its name twice, as OpenAI's have, and the next sequence number. There is no [DONE].
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from pcg.runtime.requests.request import Chunk, Completion
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.http.errors import as_api_error
from pcg.serve.http.wire import json_bytes
from pcg.serve.openai.chat.message_reader import MessageReader
from pcg.serve.openai.chat.tool_format import ArgumentsPiece, CallPiece, Piece, TextPiece
from pcg.serve.openai.chat.tool_use import ToolUse
from pcg.serve.openai.event_stream import Events, check_ended
from pcg.serve.openai.logprobs import LogprobWriter
from pcg.serve.openai.responses.body import ResponseBody
from pcg.serve.openai.sampling_fields import SamplingDefaults

# ------------------------------------------------------------------------------------------- output


Event = dict[str, Any]


class OutputItems:
    """Makes the items of one output.

    Args:
        logprobs: None for an output without logprobs.
    Attributes:
        items: the items that have begun; the last one may grow.
    """

    def __init__(self, use: ToolUse, logprobs: LogprobWriter | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._use = use
        self._reader = MessageReader(use)
        self._logprobs = logprobs
        self._pending: list[dict[str, Any]] = []
        self._events: list[Event] = []
        self._is_open = False

    def push(
        self, text: str, found: Iterable[TokenLogprobs], status: str | None = None
    ) -> list[Event]:
        """Add text and the logprobs of its tokens; returns the events of it.

        Args:
            status: that of the last item, with the last text; None before.
        """
        self._events = []
        if self._logprobs is not None:
            self._pending += self._logprobs.tokens(found)
        for piece in self._reader.push(text, is_last=status is not None):
            self._add(piece)
        if status is not None:
            if not self.items:
                self._begin_message()
            self._close(status)
        return self._events

    def _add(self, piece: Piece) -> None:
        match piece:
            case TextPiece():
                if not (self._is_open and self.items[-1]["type"] == "message"):
                    self._close("completed")
                    self._begin_message()
                self._add_text(piece.text)
            case CallPiece():
                self._close("completed")
                self._begin_call(piece.name)
            case ArgumentsPiece():
                self.items[-1]["arguments"] += piece.text
                self._tell("response.function_call_arguments.delta", delta=piece.text)

    def _begin_message(self) -> None:
        item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._begin(item)
        item["content"] = [_part("", [])]
        self._tell("response.content_part.added", content_index=0, part=_part("", []))

    def _begin_call(self, name: str) -> None:
        assert self._use.format is not None  # it has a parser
        self._begin(
            {
                "id": f"fc_{secrets.token_hex(16)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": self._use.format.new_call_id(),
                "name": name,
                "arguments": "",
            }
        )

    def _begin(self, item: dict[str, Any]) -> None:
        self.items.append(item)
        self._is_open = True
        self._events.append(
            {
                "type": "response.output_item.added",
                "output_index": len(self.items) - 1,
                "item": dict(item),
            }
        )

    def _add_text(self, text: str) -> None:
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += self._pending
        self._tell(
            "response.output_text.delta", content_index=0, delta=text, logprobs=self._pending
        )
        self._pending = []

    def _close(self, status: str) -> None:
        """End the last item."""
        if not self._is_open:
            return
        item = self.items[-1]
        item["status"] = status
        self._is_open = False
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._pending
            self._pending = []
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            self._tell("response.output_text.done", content_index=0, **said)
            self._tell("response.content_part.done", content_index=0, part=part)
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **said)
        done = {"output_index": len(self.items) - 1, "item": item}
        self._events.append({"type": "response.output_item.done", **done})

    def _tell(self, kind: str, **said: Any) -> None:
        """Add an event of the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        self._events.append({"type": kind, **place, **said})


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


# -------------------------------------------------------------------------------------------- reply


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


# ------------------------------------------------------------------------------------------- events


class ResponseEvents(Events):
    """Makes events of chunks.

    Args:
        response: the response object as it begins.
        end: makes the whole response of a completion, and keeps it.
    """

    repeats_output = True

    def __init__(
        self,
        response: dict[str, Any],
        output: OutputItems,
        end: Callable[[Completion], dict[str, Any]],
    ) -> None:
        self._response = response
        self._output = output
        self._end = end
        self._number = 0

    def begin(self) -> bytes:
        begun = {"response": self._response}
        created = self._event({"type": "response.created", **begun})
        return created + self._event({"type": "response.in_progress", **begun})

    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._events(chunk) for chunk in chunks])

    def end(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        said = as_api_error(error)
        # OpenAI's words, which are fewer than a status has.
        code = "invalid_prompt" if said.status_code < 500 else "server_error"
        failed = {
            **self._response,
            "status": "failed",
            "output": self._output.items,
            "error": {"code": code, "message": said.detail},
        }
        return self._event({"type": "response.failed", "response": failed})

    def _events(self, chunk: Chunk) -> bytes:
        done = chunk.completion
        if done is not None:
            check_ended(done)
        found = [] if chunk.logprobs is None else [chunk.logprobs]
        status = None if done is None else status_of(done)
        events = self._output.push(chunk.text, found, status)
        if done is not None:
            response = self._end(done)
            events.append({"type": f"response.{response['status']}", "response": response})
        return b"".join([self._event(one) for one in events])

    def _event(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._number}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), json_bytes(numbered))

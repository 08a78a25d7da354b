"""POST /v1/chat/completions.

The events of a streamed chat completion.

    data: {"id", "object", "created", "model", "choices": [{"index", "delta": {"role": "assistant",
           "content": ""}, "logprobs", "finish_reason"}]}
    data: {…, "choices": [{…, "delta": {"content": "…"}}]}
    data: {…, "choices": [{…, "delta": {"tool_calls": [{"index", "id", "type", "function"}]}}]}
    data: {…, "choices": [], "usage": {…}}                    with stream_options.include_usage
    data: [DONE]

All events of one step of the engine are sent together.

/v1/chat/completions: the next message of a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency, Submitted
from pcg.serve.http.wire import json_bytes, new_id
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.body import ChatBody
from pcg.serve.openai.chat.generation import submit_chat
from pcg.serve.openai.chat.message_reader import ChatMessage
from pcg.serve.openai.chat.tool_use import ToolUse
from pcg.serve.openai.completions import STREAMED, Usage, Wanted, counted, usage_of
from pcg.serve.openai.event_stream import Events, check_ended, event
from pcg.serve.openai.generation_config import GenerationConfig
from pcg.serve.openai.logprobs import ChatLogprobs, LogprobWriter, TokenTexts, prompt_logprobs

# ------------------------------------------------------------------------------------------- events


class ChatEvents(Events):
    """Makes events of chunks.

    Args:
        head: the fields that all events have.
        use: how outputs are read.
        logprobs: None without logprobs.
    """

    def __init__(
        self,
        service: Service,
        head: dict[str, Any],
        submitted: Submitted,
        use: ToolUse,
        wanted: Wanted,
        logprobs: LogprobWriter | None,
    ) -> None:
        self._head = {**head, "choices": []}
        self._request = submitted.request
        self._use = use
        self._wanted = wanted
        self._logprobs = logprobs
        self._texts = service.part(TokenTexts)
        self._messages: dict[int, ChatMessage] = {}
        self._output = self._cached = 0
        # Written once: an event is this, its choice, and the end.
        self._opening = b"data: " + json_bytes(self._head)[:-2]
        self._end = b'],"usage":null}\n\n' if wanted.usage else b"]}\n\n"

    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._events(chunk) for chunk in chunks])

    def end(self) -> bytes:
        usage = event({**self._head, "usage": self._usage()}) if self._wanted.usage else b""
        return usage + super().end()

    def _events(self, chunk: Chunk) -> bytes:
        done, index = chunk.completion, chunk.choice
        message = self._messages.get(index)
        made = b""
        if message is None:
            message = self._messages[index] = ChatMessage(self._use)
            made = self._first(index, chunk)  # before its token is counted
        if chunk.token_id is not None:
            self._output += 1
        reason = None
        if done is not None:
            check_ended(done)
            self._cached = done.cached_tokens
        delta = message.delta(chunk.text, is_last=done is not None)
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None}
        if done is not None:
            reason = message.finish_reason(done.finish_reason)
            choice["stop_reason"] = done.stop_reason
        choice["finish_reason"] = reason
        if self._logprobs is not None and chunk.logprobs is not None:
            choice["logprobs"] = self._logprobs.content([chunk.logprobs])
        if self._wanted.token_ids:
            choice["token_ids"] = [] if chunk.token_id is None else [chunk.token_id]
        elif not delta and done is None and choice["logprobs"] is None:
            return made
        return made + self._written(choice)

    def _first(self, index: int, chunk: Chunk) -> bytes:
        """Return a message's first event; the first of all has what is asked of the prompt."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        further: dict[str, Any] = {}
        if self._wanted.token_ids and len(self._messages) == 1:
            further["prompt_token_ids"] = list(self._request.prompt_ids)
        if self._wanted.prompt_logprobs and chunk.prompt_logprobs is not None:
            further["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs, self._texts)
        return self._written(choice, further)

    def _written(self, choice: dict[str, Any], further: dict[str, Any] | None = None) -> bytes:
        if further or self._wanted.running_usage:
            usage = {"usage": self._usage()} if self._wanted.running_usage else {}
            return event({**self._head, "choices": [choice], **usage, **(further or {})})
        return self._opening + json_bytes(choice) + self._end

    def _usage(self) -> dict[str, Any]:
        return counted(len(self._request.prompt_ids), self._output, self._cached)


# -------------------------------------------------------------------------------------- completions


router = APIRouter(prefix="/v1", tags=["chat"], route_class=LongBodyRoute)


class FunctionOfCall(BaseModel):
    """The function of a tool call; its arguments are JSON in a text."""

    name: str
    arguments: str


class ToolCallOfReply(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class ReplyMessage(BaseModel):
    """The assistant's message; its content is null where it calls tools alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallOfReply] | None = None


class ChatChoice(BaseModel):
    """One of the messages that were asked for."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatReply(BaseModel):
    """A chat's next message, or several of them."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    prompt_token_ids: list[int] | None = None


@router.post("/chat/completions", response_model=ChatReply, responses={200: STREAMED})
async def create_chat_completion(
    body: ChatBody,
    request: Request,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.INFER))],
) -> Response:
    """Generate the next message of a chat."""
    call = await Call.of(service, request, caller, body)
    reply_id = new_id("chatcmpl")
    chat = body.chat(request, service.part(GenerationConfig).defaults)
    call, submitted, use = await submit_chat(call, chat, reply_id)
    texts = service.part(TokenTexts)
    logprobs = LogprobWriter(texts, bool(body.return_tokens_as_token_ids))
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = call.head(kind, reply_id, body.request_id)
    if body.stream:
        wanted = Wanted.of(
            bool(body.return_token_ids), body.prompt_logprobs is not None, body.stream_options
        )
        writer = logprobs if body.logprobs else None
        events = ChatEvents(service, head, submitted, use, wanted, writer)
        return await call.stream([submitted], events)
    (group,) = await call.completions([submitted])

    def whole() -> bytes:
        content = {**head, "choices": [_choice(body, use, logprobs, done) for done in group]}
        content["usage"] = usage_of([group])
        found = group[0].prompt_logprobs
        if body.prompt_logprobs is not None and found is not None:
            content["prompt_logprobs"] = prompt_logprobs(found, texts)
        if body.return_token_ids:
            content["prompt_token_ids"] = list(submitted.request.prompt_ids)
        return json_bytes(content)

    return await call.reply(whole)


def _choice(
    body: ChatBody, use: ToolUse, logprobs: LogprobWriter, done: Completion
) -> dict[str, Any]:
    """Return one message, as JSON."""
    message = ChatMessage(use)
    choice: dict[str, Any] = {
        "index": done.index,
        "message": message.whole(done.text),
        "logprobs": None,
        "finish_reason": message.finish_reason(done.finish_reason),
        "stop_reason": done.stop_reason,
    }
    if done.logprobs is not None:
        choice["logprobs"] = logprobs.content(done.logprobs)
    if body.return_token_ids:
        choice["token_ids"] = list(done.token_ids)
    return choice

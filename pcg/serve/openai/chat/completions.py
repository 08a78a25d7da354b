"""/v1/chat/completions: the next message of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Completion
from pcg.serve.json_bytes import json_bytes
from pcg.serve.long_body import LongBodyRoute
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.body import ChatBody
from pcg.serve.openai.chat.events import ChatEvents
from pcg.serve.openai.chat.generation import submit_chat
from pcg.serve.openai.chat.logprobs import ChatLogprobs, LogprobWriter
from pcg.serve.openai.chat.message_reader import ChatMessage
from pcg.serve.openai.chat.tool_use import ToolUse
from pcg.serve.openai.completion_events import Wanted
from pcg.serve.openai.completions import STREAMED
from pcg.serve.openai.logprobs import prompt_logprobs
from pcg.serve.openai.usage import Usage, usage_of
from pcg.serve.security.caller import Caller, requires
from pcg.serve.service import ServiceDependency, new_id

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
    chat = body.chat(request, service.generation.defaults)
    call, submitted, use = await submit_chat(call, chat, reply_id)
    texts = service.token_texts
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

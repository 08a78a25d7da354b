"""/v1/messages: Anthropic's API over the chats of a model and its adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from pcg.keys import Scope
from pcg.serve.anthropic.body import CountBody, MessagesBody
from pcg.serve.anthropic.output import MessageBlocks, MessageEvents, begun_message, whole_message
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ERRORS, MESSAGES, of_validation
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.http.wire import json_bytes, new_id
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.generation import Chat, prepared, submit_chat
from pcg.serve.openai.completions import STREAMED
from pcg.serve.openai.generation_config import GenerationConfig

Infer = Annotated[Caller, Depends(requires(Scope.INFER))]


class MessageError(BaseModel):
    """The error itself."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """The body of every reply that is an error."""

    type: Literal["error"]
    error: MessageError


router = APIRouter(
    prefix=MESSAGES,
    tags=["messages"],
    route_class=LongBodyRoute,
    responses={status: {**one, "model": MessageErrorBody} for status, one in ERRORS.items()},
)


class MessageUsage(BaseModel):
    """The tokens of a message; those of the prompt that the KV cache had are apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(BaseModel):
    """The next message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


@router.post("", response_model=MessageReply, responses={200: STREAMED})
async def create_message(
    body: MessagesBody, request: Request, service: ServiceDependency, caller: Infer
) -> Response:
    """Generate the next message."""
    call = await Call.of(service, request, caller, body)
    message_id = new_id("msg").replace("-", "_")
    chat = await _chat(call, body)
    call, submitted, use = await submit_chat(call, chat, message_id)
    prompt = len(submitted.request.prompt_ids)
    message = begun_message(message_id, call.model.name, prompt)
    blocks = MessageBlocks(use)
    if body.stream:
        return await call.stream([submitted], MessageEvents(message, blocks, prompt))
    ((done,),) = await call.completions([submitted])
    return await call.reply(lambda: json_bytes(whole_message(message, blocks, done)))


@router.post("/count_tokens", response_model=TokenCount)
async def count_tokens(
    body: CountBody, request: Request, service: ServiceDependency, caller: Infer
) -> Response:
    """Count the tokens of a prompt."""
    call = await Call.of(service, request, caller, body)
    chat = await _chat(call, body)
    with call.names.naming():
        prompt, _ = await service.beside(caller, prepared, service, chat)
    return await call.reply(lambda: json_bytes({"input_tokens": len(prompt)}))


async def _chat(call: Call, body: CountBody) -> Chat:
    """Return the chat that is asked for, which is made beside the event loop."""

    def made() -> Chat:
        try:
            chat = body.chat_body()
        except ValidationError as error:  # what the bounds of a chat refuse
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise of_validation(RequestValidationError(found)) from error
        return chat.chat(call.request, call.service.part(GenerationConfig).defaults)

    with call.names.naming():
        return await call.service.beside(call.caller, made)

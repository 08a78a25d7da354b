"""/v1/chat/completions: the next message of a chat.

data: {"id", "object", "created", "model", "choices": [{"index", "delta": {"role": "assistant",
"content": ""}, "logprobs", "finish_reason"}]}
data: {…, "choices": [{…, "delta": {"content": "…"}}]}
data: {…, "choices": [{…, "delta": {"tool_calls": [{"index", "id", "type", "function"}]}}]}
data: {…, "choices": [], "usage": {…}}                    with stream_options.include_usage
data: [DONE]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.runtime.requests.request import Chunk, Completion, RequestFields
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Service, Submitted
from pcg.serve.http.wire import json_bytes, new_id
from pcg.serve.openai.logprobs import ChatLogprobs
from pcg.serve.openai.messages import (
    Message,
    Messages,
    Template,
    check_continued,
    prompt_of,
    template_messages,
)
from pcg.serve.openai.replies import STREAMED, Call, CallDependency, ChoiceReply, Usage, event
from pcg.serve.openai.sampling import (
    ResponseFormat,
    SamplingBody,
    SamplingDefaults,
    Whole,
    content_schema,
    of_engine,
)
from pcg.serve.openai.tool_formats import CallPiece, TextPiece
from pcg.serve.openai.tools import (
    AskedTools,
    ChatSupport,
    MessageReader,
    ToolChoice,
    Tools,
    ToolUse,
)
from pcg.serve.openai.wire import Empty, FieldNames, Nothing, Off, On, Only, StreamOptions

router = APIRouter(prefix="/v1", tags=["chat"], route_class=LongBodyRoute)

_GUIDES = tuple(f"guided_{kind}" for kind in ("json", "json_object", "regex", "choice", "grammar"))


def support_of(service: Service, model: ServedModel) -> ChatSupport:
    """Return the chat support of a model, with the template in an adapter's folder."""
    support = service.part(ChatSupport)
    if model.adapter is None:
        return support
    origin = service.part(Catalog).loader.origin(model.adapter.name)
    return support.of(None if origin is None else origin.template)


@dataclass(frozen=True)
class Chat:
    """A chat to continue.

    Attributes:
        fields: the request's fields; without `max_new_tokens`, the output may fill the context.
    """

    messages: Sequence[Message]
    tools: AskedTools = field(default_factory=AskedTools)
    fields: RequestFields = field(default_factory=RequestFields)
    template: Template = field(default_factory=Template)

    def prompt(self, support: ChatSupport, max_model_len: int | None) -> tuple[list[int], ToolUse]:
        """Return the chat's tokens and use of tools. It takes milliseconds, so run it on a thread.

        Args:
            max_model_len: the most tokens of a prompt and its output; None without a limit.
        Raises:
            ApiError: the chat is invalid.
            GenerationError: the template refuses the messages.
        """
        template = self.template
        if template.chat_template is not None and not support.trusts_templates:
            raise ApiError(
                400,
                "chat_template is not accepted in requests: a template is a program. The operator "
                "may allow it by --trust-request-chat-template.",
                param="chat_template",
            )
        messages = template_messages(
            self.messages, knows_developer=support.knows_developer, reads_parts=support.reads_parts
        )
        use = self.tools.use(support)
        shown = use.shown
        if template.chat_template is None:
            messages, shown = use.in_prompt(support, messages)
        tokens = prompt_of(
            support.tokenizer, messages, shown, template, max_model_len=max_model_len
        )
        return tokens, use

    async def submit(self, call: Call, reply_id: str) -> tuple[Call, Submitted, ToolUse]:
        """Submit the chat; return its call with all names, the request, and its use of tools.

        Raises:
            ApiError: the chat is invalid or too long.
            GenerationError: the template refuses the messages, or a field is invalid.
            EngineError: the engine takes no requests.
        """
        service, tools = call.service, self.tools
        with call.names.naming():
            prompt, use = await service.beside(
                call.caller, self.prompt, support_of(service, call.model), service.max_model_len
            )
        guide = next((name for name in _GUIDES if name in self.fields), None)
        if guide is not None and "guided_grammar" in use.fields:
            name = call.names.names[guide]
            raise ApiError(
                400,
                f"{name} and these tools cannot be given together; use {tools.content_field}, or "
                "tool_choice='none'",
                param=name,
            )
        fields: RequestFields = {**self.fields, **use.fields}
        if "guided_grammar" in use.fields:
            of_content = "" if tools.content is None else f" and of {tools.content_field}"
            names = call.names.with_tools(f"The schemas of the tools{of_content}")
            call = replace(call, names=names)
        elif tools.content is not None:
            fields["guided_json"] = tools.content
        if "max_new_tokens" not in fields:
            room = await service.room(call.model)
            kept = fields.get("truncate_prompt_tokens")
            length = min(len(prompt), kept if isinstance(kept, int) and kept > 0 else room)
            most = call.defaults.max_new_tokens or room
            fields["max_new_tokens"] = max(1, min(room - length, most))
        (submitted,) = await call.submit([prompt], fields, reply_id)
        return call, submitted, use


class ChatBody(SamplingBody):
    """A request for the next message of a chat.

    Some fields have no effect: replies are not stored, there is a single service tier, the prefix
    cache needs no key, and `user` and `safety_identifier` only name people.
    """

    messages: Messages
    logprobs: bool | None = None
    max_completion_tokens: Whole | None = None
    max_tokens: Whole | None = None
    model: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: Tools | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: Annotated[str, Field(max_length=262_144)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None

    # without effect
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    user: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    # unsupported
    audio: Nothing = None
    echo: Off = None
    function_call: Annotated[Any, Only(("none",))] = None
    functions: Empty = None
    include_reasoning: On = None
    media_io_kwargs: Nothing = None
    moderation: Nothing = None
    return_prompt_text: Off = None
    web_search_options: Nothing = None

    def names(self) -> FieldNames:
        is_old = self.max_completion_tokens is None and self.max_tokens is not None
        names = {
            "max_new_tokens": "max_tokens" if is_old else "max_completion_tokens",
            "logprobs": "top_logprobs",
            "guided_json": "response_format",
        }
        return FieldNames("messages", {**names, **self.guide_names()})

    def chat(self, request: Request, defaults: SamplingDefaults) -> Chat:
        """Return the chat.

        Raises:
            ApiError: fields exclude each other.
        """
        self._check()
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        fields = self.request_fields(request, defaults)
        content = content_schema(self.response_format, self.guide)
        is_parallel = self.parallel_tool_calls is not False
        tools = AskedTools(self.tools or [], self.tool_choice, is_parallel, content=content)
        continues = bool(self.continue_final_message)
        template = Template(
            add_generation_prompt=self.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            add_special_tokens=bool(self.add_special_tokens),
            documents=self.documents,
            variables=with_effort(self.chat_template_kwargs, self.reasoning_effort),
            chat_template=self.chat_template,
        )
        request_fields = of_engine(fields, {"max_new_tokens": most, "logprobs": logprobs})
        return Chat(self.messages, tools, request_fields, template=template)

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            message = "stream_options needs stream=true; leave it out"
            raise ApiError(400, message, param="stream_options")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        check_continued(self.continue_final_message, self.add_generation_prompt)
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and "
                f"max_completion_tokens={self.max_completion_tokens} differ; give one",
                param="max_tokens",
            )


def with_effort(variables: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Add an effort to the variables of a chat template, unless they have it."""
    return {**({} if effort is None else {"reasoning_effort": effort}), **(variables or {})}


class FunctionOfCall(BaseModel):
    """The function of a tool call; its arguments are JSON text."""

    name: str
    arguments: str


class ToolCallOfReply(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class ReplyMessage(BaseModel):
    """The assistant's message; its content is null if it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallOfReply] | None = None


class ChatChoice(BaseModel):
    """A message of a reply."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatReply(BaseModel):
    """The next message of a chat, or several alternatives."""

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
async def create_chat_completion(body: ChatBody, call: CallDependency) -> Response:
    """Generate the next message of a chat."""
    call = await call.of(body)
    reply_id = new_id("chatcmpl")
    chat = body.chat(call.request, call.defaults)
    call, submitted, use = await chat.submit(call, reply_id)
    reply = ChatMessages(call, submitted, body, use, reply_id=reply_id)
    return await call.answer([submitted], reply, streams=body.stream)


class ChatMessage:
    """An assistant's message of a chat completion, whole or as deltas."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = MessageReader(use)
        self._calls = 0

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in self._reader.push(text, is_last=is_last):
            if isinstance(piece, TextPiece):
                content.append(piece.text)
            elif isinstance(piece, CallPiece):
                function = {"name": piece.name, "arguments": ""}
                call = {"index": self._calls, "id": self._use.new_call_id(), "type": "function"}
                calls.append({**call, "function": function})
                self._calls += 1
            else:
                if not calls or calls[-1]["index"] != self._calls - 1:
                    calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
        delta: dict[str, Any] = {"content": "".join(content)} if content else {}
        if calls:
            delta["tool_calls"] = calls
        return delta

    def whole(self, text: str) -> dict[str, Any]:
        delta = self.delta(text, is_last=True)
        calls = delta.get("tool_calls", [])
        content = delta.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        return message

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason of the message; a call of a named tool ends in `stop`."""
        if self._reader.has_called and reason == "stop" and not self._use.is_named:
            return "tool_calls"
        return reason


class ChatMessages(ChoiceReply):
    """Writes chat completions.

    Args:
        use: the use of tools, for parsing outputs.
    """

    def __init__(
        self, call: Call, submitted: Submitted, body: ChatBody, use: ToolUse, *, reply_id: str
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        options = body.stream_options
        super().__init__(call, [submitted], body, options, kind=kind, reply_id=reply_id)
        self._request = submitted.request
        self._use = use
        self._messages: dict[int, ChatMessage] = {}
        # Written once: an event consists of the opening, its choice, and the end.
        self._opening = b"data: " + json_bytes(self.head)[:-2]
        self._end = b'],"usage":null}\n\n' if self.has_usage else b"]}\n\n"

    def whole(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        choices = [self._choice(completion) for completion in groups[0]]
        content = {**self.head, "choices": choices, "usage": self.usage(groups)}
        values = groups[0][0].prompt_logprobs
        if self.has_prompt_logprobs and values is not None:
            content["prompt_logprobs"] = self.logprobs.prompt(values)
        if self.has_token_ids:
            content["prompt_token_ids"] = list(self._request.prompt_ids)
        return content

    def _choice(self, completion: Completion) -> dict[str, Any]:
        message = ChatMessage(self._use)
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message.whole(completion.text),
            "logprobs": None,
            "finish_reason": message.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            choice["logprobs"] = self._content(completion.logprobs)
        if self.has_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def _content(self, values: Sequence[Any]) -> dict[str, Any]:
        return {"content": self.logprobs.tokens(values), "refusal": None}

    def events(self, index: int, chunk: Chunk) -> bytes:
        completion = chunk.completion
        message, opening = self._messages.get(chunk.choice), b""
        if message is None:
            message = self._messages[chunk.choice] = ChatMessage(self._use)
            opening = self._first(chunk)
        delta, reason = message.delta(chunk.text, is_last=completion is not None), None
        choice: dict[str, Any] = {"index": chunk.choice, "delta": delta, "logprobs": None}
        if completion is not None:
            reason = message.finish_reason(completion.finish_reason)
            choice["stop_reason"] = completion.stop_reason
        choice["finish_reason"] = reason
        if chunk.logprobs is not None:
            choice["logprobs"] = self._content([chunk.logprobs])
        if self.has_token_ids:
            choice["token_ids"] = [] if chunk.token_id is None else [chunk.token_id]
        elif not delta and completion is None and chunk.logprobs is None:
            return opening
        return opening + self._written(choice)

    def _first(self, chunk: Chunk) -> bytes:
        """Return a message's first event; the very first event has the prompt's parts."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": chunk.choice, "delta": delta, "logprobs": None, "finish_reason": None}
        further: dict[str, Any] = {}
        if self.has_token_ids and len(self._messages) == 1:
            further["prompt_token_ids"] = list(self._request.prompt_ids)
        if self.has_prompt_logprobs and chunk.prompt_logprobs is not None:
            further["prompt_logprobs"] = self.logprobs.prompt(chunk.prompt_logprobs)
        self.output_tokens -= chunk.token_id is not None  # the next event counts the token
        written = self._written(choice, further)
        self.output_tokens += chunk.token_id is not None
        return written

    def _written(self, choice: dict[str, Any], further: Mapping[str, Any] | None = None) -> bytes:
        if further or self.has_running_usage:
            usage = {"usage": self.usage()} if self.has_running_usage else {}
            return event({**self.head, "choices": [choice], **usage, **(further or {})})
        return self._opening + json_bytes(choice) + self._end

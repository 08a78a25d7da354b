"""/v1/messages: Anthropic's API over the chats of a model and its adapters.

event: message_start            data: {"type", "message": {…, "content": [], "usage"}}
event: content_block_start      data: {"type", "index", "content_block"}
event: content_block_delta      data: {"type", "index", "delta": {"type": "text_delta", "text"}}
                                or {"type": "input_json_delta", "partial_json"}
event: content_block_stop       data: {"type", "index"}
event: message_delta            data: {"type", "delta": {"stop_reason", …}, "usage"}
event: message_stop
event: error                    data: {"type": "error", "error"}, the last one
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from starlette.responses import Response

from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.http.errors import (
    ERRORS,
    MESSAGES,
    UNSUPPORTED,
    ApiError,
    as_api_error,
    of_validation,
)
from pcg.serve.http.service import LongBodyRoute, Submitted
from pcg.serve.http.wire import WireModel, json_bytes, new_id
from pcg.serve.openai.chat import Chat, ChatBody, support_of
from pcg.serve.openai.messages import MOST_MESSAGES, check_parts, text_or_list
from pcg.serve.openai.replies import STREAMED, Call, CallDependency, ItemReply, named_event
from pcg.serve.openai.response_items import required
from pcg.serve.openai.sampling import Share, Temperature, Whole
from pcg.serve.openai.tools import MOST_TOOLS, FunctionName, ToolUse
from pcg.serve.openai.wire import FieldNames, Nothing, Only


class Block(WireModel):
    """A block of a content; other fields, such as `cache_control`, have no effect."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Content | None = None


Content: TypeAlias = Annotated[
    Annotated[str, Tag("a-text")] | Annotated[list[Block], Tag("a-list")],
    Discriminator(text_or_list),
]


Block.model_rebuild()


class GivenMessage(WireModel):
    """A message; system messages may follow others, as in newer versions of the API."""

    role: Literal["user", "assistant", "system"]
    content: Content


class GivenTool(WireModel):
    """A client's tool; server tools of Anthropic are refused by their type.

    `cache_control`, `eager_input_streaming` and `input_examples` have no effect.
    """

    type: Annotated[Any, Only(("custom",))] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: Annotated[Any, Only((["direct"],))] = None
    cache_control: Any = None
    defer_loading: Annotated[Any, Only((False,))] = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class GivenChoice(WireModel):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    """The variable `enable_thinking` of the chat template.

    `enabled` is refused, as a budget of thoughts is not supported; `display` has no effect, as
    thoughts are in the text.
    """

    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(WireModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    """The format of the output; `effort` is a variable of the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(WireModel):
    """Messages to count tokens of; `cache_control` and `speed` have no effect."""

    model: str | None = None
    messages: Annotated[
        list[GivenMessage],
        Field(min_length=1, max_length=MOST_MESSAGES),
        BeforeValidator(check_parts),
    ]
    system: Content | None = None
    tools: Annotated[list[GivenTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: GivenChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: Nothing = None
    mcp_servers: Annotated[Any, Only(([],))] = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: Nothing = None
    workspace_id: Nothing = None

    def names(self) -> FieldNames:
        names = {
            "max_new_tokens": "max_tokens",
            "stop": "stop_sequences",
            "guided_json": "output_config.format",
            "response_format": "output_config.format",
        }
        return FieldNames("messages", names)

    def chat_body(self) -> ChatBody:
        """Convert to a chat completion, which continues a final assistant message.

        ApiError: a block or a choice is not supported.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages = [{"role": "system", "content": _texts(self.system, "system")}]
        for index, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{index}")
        fields: dict[str, Any] = {"messages": messages, "model": self.model}
        last = messages[-1]
        fields["continue_final_message"] = last["role"] == "assistant" and "tool_calls" not in last
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        if self.thinking is not None and self.thinking.type == "enabled":
            raise ApiError(
                400,
                "thinking.budget_tokens is not supported; send "
                '{"type": "adaptive"} or {"type": "disabled"}.',
                param="thinking",
                code=UNSUPPORTED,
            )
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type == "adaptive")
        fields["chat_template_kwargs"] = variables
        config = self.output_config or OutputConfig()
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatBody.model_validate({**fields, **self._sampling()})

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountBody):
    """A request for the next message.

    `metadata`, `service_tier` and `inference_geo` have no effect; `cache_salt` and
    `chat_template_kwargs` are vLLM's.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: Whole | None = None
    top_p: Share | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    container: Nothing = None
    diagnostics: Nothing = None

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt")
        return {"stop": self.stop_sequences, **{name: getattr(self, name) for name in names}}


def _messages(message: GivenMessage, place: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        where = f"{place}.content.{index}"
        match block.type, message.role:
            case "text", _:
                texts.append(_text(block, where))
            case "thinking" | "redacted_thinking", "assistant":
                thoughts.append(block.thinking or "")  # a redacted thought has no text
            case "tool_use", "assistant":
                function = {
                    "name": required(block.name, f"{where}.name"),
                    "arguments": block.input or {},
                }
                call_id = required(block.id, f"{where}.id")
                calls.append({"id": call_id, "type": "function", "function": function})
            case "tool_result", "user":
                content = _texts(block.content or [], f"{where}.content")
                call_id = required(block.tool_use_id, f"{where}.tool_use_id")
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case _:
                raise _unsupported(block, where)
    chat_message = dict[str, Any](role=message.role, content=texts)
    if any(thoughts):
        chat_message["reasoning_content"] = "".join(thoughts)
    if calls:
        chat_message["tool_calls"] = calls
    return [*results, chat_message] if texts or calls or not results else results


def _texts(content: str | list[Block], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_text(block, f"{where}.{index}") for index, block in enumerate(content)]


def _text(block: Block, where: str) -> dict[str, Any]:
    if block.type != "text":
        raise _unsupported(block, where)
    return {"type": "text", "text": required(block.text, f"{where}.text")}


def _unsupported(block: Block, where: str) -> ApiError:
    return ApiError(
        400,
        f"{where} is of type {block.type[:64]!r}; this server reads text, tool_use and thinking "
        "of an assistant, and tool_result of a user",
        param=where,
        code="unsupported_content",
    )


def _tool(tool: GivenTool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {"type": "object", **tool.input_schema},
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: GivenChoice) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    match choice.type:
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            name = required(choice.name, "tool_choice.name")
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        case other:
            fields["tool_choice"] = other
    return fields


class MessageError(BaseModel):
    """The content of an error."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """The body of an error reply."""

    type: Literal["error"]
    error: MessageError


class MessageUsage(BaseModel):
    """The tokens of a message; prompt tokens from the KV cache are counted separately."""

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


router = APIRouter(
    prefix=MESSAGES,
    tags=["messages"],
    route_class=LongBodyRoute,
    responses={status: {**reply, "model": MessageErrorBody} for status, reply in ERRORS.items()},
)


@router.post("", response_model=MessageReply, responses={200: STREAMED})
async def create_message(body: MessagesBody, call: CallDependency) -> Response:
    """Generate the next message."""
    call = await call.of(body)
    message_id = new_id("msg").replace("-", "_")
    chat = await _chat(call, body)
    call, submitted, use = await chat.submit(call, message_id)
    reply = MessageBlocks([submitted], message_id, call.model.name, use)
    return await call.answer([submitted], reply, streams=body.stream)


@router.post("/count_tokens", response_model=TokenCount)
async def count_tokens(body: CountBody, call: CallDependency) -> Response:
    """Count the tokens of a prompt."""
    call = await call.of(body)
    chat = await _chat(call, body)
    with call.names.naming():
        prompt, _ = await call.service.beside(
            call.caller,
            chat.prompt,
            support_of(call.service, call.model),
            call.service.max_model_len,
        )
    return await call.whole(lambda: json_bytes({"input_tokens": len(prompt)}))


async def _chat(call: Call, body: CountBody) -> Chat:
    def convert() -> Chat:
        try:
            chat = body.chat_body()
        except ValidationError as error:  # the limits of a chat
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise of_validation(RequestValidationError(errors)) from error
        return chat.chat(call.request, call.defaults)

    with call.names.naming():
        return await call.service.beside(call.caller, convert)


class MessageBlocks(ItemReply):
    """Writes a message of blocks; a call's input is JSON text until the message ends."""

    def __init__(
        self, submitted: Sequence[Submitted], message_id: str, model: str, use: ToolUse
    ) -> None:
        super().__init__(submitted, use)
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self.prompt_tokens, 0, 0),
        }

    def whole(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Return the whole message; a truncated call has an empty input."""
        ((completion,),) = groups
        self.read(completion.text, "completed")
        usage = _usage(
            completion.prompt_tokens, completion.cached_tokens, len(completion.token_ids)
        )
        content = [
            {**block, "input": _input(block["input"])} if block["type"] == "tool_use" else block
            for block in self.items
        ]
        return {**self._message, "content": content, **self._reasons(completion), "usage": usage}

    def begin(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message})

    def events(self, index: int, chunk: Chunk) -> bytes:
        completion = chunk.completion
        events = self.read(chunk.text, None if completion is None else "completed")
        if completion is not None:
            usage = _usage(self.prompt_tokens, completion.cached_tokens, self.output_tokens)
            delta = self._reasons(completion)
            events.append({"type": "message_delta", "delta": delta, "usage": usage})
        return b"".join(map(named_event, events))

    def end(self) -> bytes:
        return named_event({"type": "message_stop"})

    def failed(self, error: Exception) -> bytes:
        return named_event(as_api_error(error).content_for(MESSAGES))

    def _reasons(self, completion: Completion) -> dict[str, Any]:
        """Return Anthropic's stop reason of a message."""
        if completion.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        reason = "tool_use" if self.reader.has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def text_item(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def call_item(self, name: str) -> dict[str, Any]:
        call_id = f"toolu_{secrets.token_hex(12)}"
        return {"type": "tool_use", "id": call_id, "name": name, "input": {}}

    def begun(self, item: dict[str, Any]) -> None:
        self.emit("content_block_start", index=len(self.items) - 1, content_block=dict(item))
        if item["type"] == "tool_use":
            item["input"] = ""

    def add_text(self, item: dict[str, Any], text: str) -> None:
        item["text"] += text
        self._emit_delta({"type": "text_delta", "text": text})

    def add_arguments(self, item: dict[str, Any], text: str) -> None:
        item["input"] += text
        self._emit_delta({"type": "input_json_delta", "partial_json": text})

    def ended(self, item: dict[str, Any], status: str) -> None:
        self.emit("content_block_stop", index=len(self.items) - 1)

    def _emit_delta(self, delta: dict[str, str]) -> None:
        self.emit("content_block_delta", index=len(self.items) - 1, delta=delta)


def _input(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }

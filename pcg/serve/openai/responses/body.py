"""Bodies of POST /v1/responses.

Items of an input, and the messages that they are.

The body of a response's request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Request
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pcg.runtime.requests.request import RequestFields
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel, json_bytes
from pcg.serve.openai.chat.messages import (
    CalledFunction,
    Content,
    ContentPart,
    Message,
    ToolCall,
    check_parts,
    text_or_list,
)
from pcg.serve.openai.chat.tool_use import (
    MOST_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    AskedTools,
    Function,
    FunctionName,
    FunctionRef,
    NamedTool,
    Tool,
    ToolChoice,
)
from pcg.serve.openai.sampling_fields import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingBody,
    SamplingDefaults,
    TextFormat,
    Whole,
    content_schema,
)
from pcg.serve.openai.wire import AbsentOfResponses, FieldNames

# -------------------------------------------------------------------------------------------- items


MOST_ITEMS = 4096
_OBJECT_BYTES, _VALUE_BYTES = 1024, 64
"""The memory of an item or a part beside its texts, and of any other value in it."""
_TEXTS = ("input_text", "output_text", "text")
_OF_REPLIES = {"annotations", "parsed_arguments"}
"""Fields that items of replies have, and that say nothing to a model."""


class InputItem(WireModel):
    """A message, a function call or the output of one; other items are refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


Items = Annotated[
    list[InputItem], Field(min_length=1, max_length=MOST_ITEMS), BeforeValidator(check_parts)
]
Input = Annotated[
    Annotated[str, Tag("a-text")] | Annotated[Items, Tag("a-list")], Discriminator(text_or_list)
]


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """Return the messages that items are; calls are in the message of the assistant before them.

    Raises:
        ApiError: an item is of another type, or lacks what its type has.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        _check_known(item, place)
        match item.type:
            case "message":
                messages.append(_message(item, place))
            case "function_call":
                _add_call(messages, item, place)
            case "function_call_output":
                content = _text(item.output, f"{place}.output")
                call_id = _given(item.call_id, f"{place}.call_id")
                messages.append(
                    Message(role="tool", content=content, tool_call_id=call_id, name=item.name)
                )
            case _:
                raise ApiError(
                    400,
                    f"{place} is of type {item.type[:64]!r}; this server takes message, "
                    "function_call and function_call_output",
                    param=f"input.{index}",
                    code="unsupported_item",
                )
    return messages


def _check_known(item: InputItem, place: str) -> None:
    if item.type not in ("message", "function_call", "function_call_output"):
        return
    for name, value in (item.model_extra or {}).items():
        if value is not None and name not in _OF_REPLIES:
            raise ApiError(400, f"Unrecognized request argument supplied: {place}.{name[:64]}")


def _message(item: InputItem, place: str) -> Message:
    role = _given(item.role, f"{place}.role")
    content = _text(item.content, f"{place}.content")
    return Message(role=role, content=content)  # type: ignore[arg-type]


def _add_call(messages: list[Message], item: InputItem, place: str) -> None:
    name = _given(item.name, f"{place}.name")
    arguments = _given(item.arguments, f"{place}.arguments")
    call_id = _given(item.call_id, f"{place}.call_id")
    call = ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls = [*(last.tool_calls or []), call]
        messages.append(last.model_copy(update={"tool_calls": calls}))
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _given(value: str | None, place: str) -> str:
    if value is None:
        raise ApiError(400, f"Missing required parameter: '{place}'.", param=place)
    return value


def _text(content: str | list[ContentPart] | None, place: str) -> str | list[ContentPart]:
    """Return a content as chats have it."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ApiError(400, f"Missing required parameter: '{place}'.", param=place)
    parts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            raise ApiError(
                400,
                f"{place}[{index}] is of type {part.type[:64]!r}; this model reads text parts "
                "alone, each with its 'text'",
                param=f"{place}[{index}]",
                code="unsupported_content",
            )
        parts.append(ContentPart(type="text", text=text))
    return parts


def memory_of(items: Sequence[InputItem]) -> int:
    """Return about how many bytes items take, which for empty parts is far more than their JSON."""
    values: list[Any] = [as_json(item) for item in items]
    found = len(json_bytes(values))
    while values:
        match values.pop():
            case dict() as one:
                found += _OBJECT_BYTES
                values += one.values()
            case list() as one:
                values += one
        found += _VALUE_BYTES
    return found


def as_json(item: InputItem) -> dict[str, Any]:
    """Return an item as it was given."""
    return item.model_dump(exclude_none=True)


# --------------------------------------------------------------------------------------------- body


LOGPROBS = "message.output_text.logprobs"
_NOT_HERE = ("prompt_logprobs", "return_token_ids")


class SchemaFormat(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextOptions(WireModel):
    """Options of the text; `verbosity` has no effect."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def response_format(self) -> ResponseFormat | None:
        """Return the format as chats have it."""
        if not isinstance(self.format, SchemaFormat):
            return self.format
        schema = JsonSchema(name=self.format.name, schema=self.format.schema_)
        return JsonSchemaFormat(type="json_schema", json_schema=schema)


class _Typed(WireModel):
    type: Literal["function"]


class FunctionTool(Function, _Typed):
    """A function that the model may call; other tools are refused."""

    def tool(self) -> Tool:
        """Return the tool as chats have it."""
        function = Function(**self.model_dump(exclude={"type"}))
        return Tool(type="function", function=function)


class FunctionChoice(WireModel):
    """The choice of one function."""

    type: Literal["function"]
    name: FunctionName


class AllowedChoice(WireModel):
    """The choice among some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MOST_TOOLS)]


Choice: TypeAlias = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


class Reasoning(WireModel):
    """Options of reasoning: `effort` is a variable of the chat template, and others do nothing."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(WireModel):
    """Options of a stream, without effect."""

    include_obfuscation: bool | None = None


class ResponseFieldsWithoutEffect(WireModel):
    """Fields of OpenAI's API that are taken and change nothing here.

    There is one tier of service, no built-in tool, and no reasoning to encrypt; what a request says
    of itself in `metadata` comes back.
    """

    max_tool_calls: Whole | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    user: str | None = None


class ResponseBody(SamplingBody, ResponseFieldsWithoutEffect, AbsentOfResponses):
    """A request for a response."""

    input: Input
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    model: str | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Choice | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the output has logprobs."""
        return LOGPROBS in (self.include or ())

    def names(self) -> FieldNames:
        """Return the names of fields that the engine has others for."""
        names = {
            "max_new_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "guided_json": "text.format",
        }
        return FieldNames("input", {**names, **self.guide_names()})

    def fields(self, request: Request, defaults: SamplingDefaults) -> RequestFields:
        """Return the fields of the engine's request.

        Raises:
            ApiError: a field is not supported here, or does not go with another.
        """
        for name in _NOT_HERE:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ApiError(400, f"{name} is not supported; leave it out.", param=name)
        if self.n not in (None, 1):
            raise ApiError(400, "n is not supported; leave it out or send 1.", param="n")
        if self.top_logprobs and not self.wants_logprobs:
            raise ApiError(400, f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs")
        found = self.request_fields(request, defaults)
        if self.max_output_tokens is not None:
            found["max_new_tokens"] = self.max_output_tokens
        if self.wants_logprobs:
            found["logprobs"] = self.top_logprobs or 0
        return found

    def asked_tools(self) -> AskedTools:
        """Return the tools, as chats have them."""
        tools = [tool.tool() for tool in self.tools or []]
        given = None if self.text is None else self.text.response_format()
        field = "text.format"
        content = content_schema(given, self.guide(), field)
        is_parallel = self.parallel_tool_calls is not False
        return AskedTools(tools, self._choice(), is_parallel, content, field)

    def _choice(self) -> ToolChoice | None:
        match self.tool_choice:
            case FunctionChoice(name=name):
                return _named(name)
            case AllowedChoice(mode=mode, tools=tools):
                allowed = AllowedTools(mode=mode, tools=[_named(tool.name) for tool in tools])
                return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
            case choice:
                return choice

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        found = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            found.setdefault("reasoning_effort", self.reasoning.effort)
        return found


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionRef(name=name))

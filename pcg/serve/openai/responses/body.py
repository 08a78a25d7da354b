"""The body of a response's request."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Request
from pydantic import Field

from pcg.runtime.requests.request import RequestFields
from pcg.serve.errors import ApiError
from pcg.serve.openai.absent_fields import AbsentOfResponses
from pcg.serve.openai.chat.response_format import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
    content_schema,
)
from pcg.serve.openai.chat.tool_use import AskedTools
from pcg.serve.openai.chat.tools import (
    MOST_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    Function,
    FunctionName,
    FunctionRef,
    NamedTool,
    Tool,
    ToolChoice,
)
from pcg.serve.openai.field_names import FieldNames
from pcg.serve.openai.responses.items import Input
from pcg.serve.openai.sampling_fields import SamplingBody, SamplingDefaults, Whole
from pcg.serve.openai.wire import WireModel

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

"""The body of /v1/messages, and the chat completion that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.chat.body import ChatBody
from pcg.serve.openai.chat.messages import MOST_MESSAGES, check_parts, text_or_list
from pcg.serve.openai.chat.tool_use import MOST_TOOLS, FunctionName
from pcg.serve.openai.sampling_fields import Share, Temperature, Whole
from pcg.serve.openai.wire import FieldNames, Nothing, Only


class Block(WireModel):
    """A block of a content; what no type here has, as `cache_control`, has no effect."""

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
    """A message; a system's may stand between others, as in newer versions of the API."""

    role: Literal["user", "assistant", "system"]
    content: Content


class GivenTool(WireModel):
    """A tool of the client's; those that Anthropic runs are refused by their type.

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
    """The variable `enable_thinking` of the chat template: whether the model thinks.

    `enabled` is refused, as thoughts have no budget here; `display` has no effect, as thoughts are
    in the text.
    """

    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(WireModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    """The form of the output; `effort` is a variable of the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(WireModel):
    """Messages whose tokens are counted; `cache_control` and `speed` have no effect."""

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
        """Return the names of fields that the engine has others for."""
        names = {
            "max_new_tokens": "max_tokens",
            "stop": "stop_sequences",
            "guided_json": "output_config.format",
            "response_format": "output_config.format",
        }
        return FieldNames("messages", names)

    def chat_body(self) -> ChatBody:
        """Return the chat completion that is asked for; a last assistant's message is continued.

        ApiError: a block or a choice is not supported.
        """
        messages = [] if self.system is None else _system(self.system)
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
                "thinking.budget_tokens is not supported: thoughts have no budget here; send "
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


def _system(content: str | list[Block]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _texts(content, "system")}]


def _messages(message: GivenMessage, place: str) -> list[dict[str, Any]]:
    """Return the messages of a chat that a message is: results of tools are their own."""
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
                calls.append(_call(block, where))
            case "tool_result", "user":
                results.append(_result(block, where))
            case _:
                raise _unsupported(block, where)
    found = dict[str, Any](role=message.role, content=texts)
    if any(thoughts):
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return [*results, found] if texts or calls or not results else results


def _call(block: Block, where: str) -> dict[str, Any]:
    name = _given(block.name, f"{where}.name")
    function = {"name": name, "arguments": block.input or {}}
    return {"id": _given(block.id, f"{where}.id"), "type": "function", "function": function}


def _result(block: Block, where: str) -> dict[str, Any]:
    content = [] if block.content is None else _texts(block.content, f"{where}.content")
    call = _given(block.tool_use_id, f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call, "content": content}


def _texts(content: str | list[Block], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_text(block, f"{where}.{index}") for index, block in enumerate(content)]


def _text(block: Block, where: str) -> dict[str, Any]:
    if block.type != "text":
        raise _unsupported(block, where)
    return {"type": "text", "text": _given(block.text, f"{where}.text")}


def _given(value: str | None, where: str) -> str:
    if value is None:
        raise ApiError(400, f"Missing required parameter: '{where}'.", param=where)
    return value


def _unsupported(block: Block, where: str) -> ApiError:
    return ApiError(
        400,
        f"{where} is of type {block.type[:64]!r}; this server reads text, and beside it an "
        "assistant's tool_use and thinking and a user's tool_result",
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
    found: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    match choice.type:
        case "any":
            found["tool_choice"] = "required"
        case "tool":
            name = _given(choice.name, "tool_choice.name")
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case other:
            found["tool_choice"] = other
    return found

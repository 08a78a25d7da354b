"""Tools of a chat: on the wire, in the prompt, and in the grammar that guides an output with calls.

Some templates write no tools, no calls or no results. The model would then not know a tool that it
must call, or not see a call's result. So tools, calls and results that the template would omit
become texts of messages.

A guide is a grammar in Lark's notation:

    forced     start: unit (sep unit)*                     tool_choice "required", or a named tool
    auto       start: text | text unit (text unit)*        calls must be valid calls of the tools
    schema     start: content | unit (sep unit)*           with a response_format

    unit       the format's opening and a group of calls
    call       the format's text around `%json {the tool's parameters}`

Each tool's parameters are a schema in a separate rule, so that its internal references resolve.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pcg.errors import ConfigError
from pcg.files import read_text
from pcg.runtime.requests.request import RequestFields
from pcg.runtime.sampling.guides import OPTIONS, json_options
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.sampling import bare
from pcg.serve.openai.tool_formats import (
    FORMATS,
    CallPiece,
    Notation,
    Piece,
    TextPiece,
    ToolFormat,
    format_of,
    reads_tools,
    writes_calls,
)

MOST_TOOLS = 128
"""OpenAI's limit."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
PlainMessages: TypeAlias = list[dict[str, Any]]


class Function(WireModel):
    """A function that the model may call; without `parameters` it has no arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments, without descriptions."""
        if self.parameters:
            schema: dict[str, Any] = bare(self.parameters, "tools")
            return schema
        return {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(WireModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionRef(WireModel):
    """A function's name."""

    name: FunctionName


class NamedTool(WireModel):
    """The choice of a tool."""

    type: Literal["function"]
    function: FunctionRef


class AllowedTools(WireModel):
    """Some of the tools, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedToolsChoice(WireModel):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


class ChatSupport:
    """The chat support of a model: its template, and the format of its tool calls.

    Args:
        tokenizer: None for a model without a tokenizer.
        chat_template: a file with a template that replaces the model's.
        tool_call_parser: the format of tool calls; None to detect it in the template.
        trusts_templates: True if requests may contain templates.

    Raises:
        ConfigError: the file cannot be read, or the template does not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        chat_template: Path | None = None,
        tool_call_parser: str | None = None,
        trusts_templates: bool = False,
    ) -> None:
        if tokenizer is not None and chat_template is not None:
            tokenizer = tokenizer.with_template(read_text(chat_template, ConfigError))
        self.tokenizer = tokenizer
        self.trusts_templates = trusts_templates
        self._parser = tool_call_parser
        self._is_fixed = chat_template is not None
        self._by_template: dict[str, ChatSupport] = {}

    def of(self, template: str | None) -> ChatSupport:
        """Return the support of an adapter with a template, unless the operator gave one."""
        if self.tokenizer is None or template is None or self._is_fixed:
            return self
        current = self.tokenizer.chat_template
        if current is not None and current.sources.get("default") == template:
            return self
        if template not in self._by_template:
            self._by_template[template] = ChatSupport(
                self.tokenizer.with_template(template),
                tool_call_parser=self._parser,
                trusts_templates=self.trusts_templates,
            )
        return self._by_template[template]

    @cached_property
    def knows_developer(self) -> bool:
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return False
        sources = self.tokenizer.chat_template.sources.values()
        return any("developer" in source for source in sources)

    @cached_property
    def reads_parts(self) -> bool:
        """True if the template accepts lists of parts as contents."""
        return self.tokenizer is not None and self.tokenizer.reads_parts()

    @cached_property
    def format(self) -> ToolFormat | None:
        return format_of(self.tokenizer, self._parser)

    @cached_property
    def reads_tools(self) -> bool:
        """True if the template writes tools into the prompt."""
        return self.tokenizer is not None and reads_tools(self.tokenizer)

    @cached_property
    def writes_calls(self) -> bool:
        """True if the template writes the calls of assistants' messages."""
        return self.tokenizer is not None and writes_calls(self.tokenizer)

    @cached_property
    def notation(self) -> Notation:
        assert self.tokenizer is not None  # a prompt was rendered
        return Notation.of(self.tokenizer)


_FALLBACK = FORMATS["hermes"]
"""Format of forced calls if the template shows no format."""


@dataclass(frozen=True)
class ToolUse:
    """The use of tools by a request.

    Attributes:
        shown: the tools for the template; None without tools.
        names: the tools that may be called; empty if the output is not parsed for calls.
        is_named: True if the request names the tool to call.
        fields: the guide of the output, and the fields that its parser needs.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()
    is_named: bool = False
    format: ToolFormat | None = None
    fields: RequestFields = field(default_factory=RequestFields)

    def new_call_id(self) -> str:
        assert self.format is not None
        return self.format.new_call_id()

    def in_prompt(
        self, support: ChatSupport, messages: PlainMessages
    ) -> tuple[PlainMessages, Sequence[Mapping[str, Any]] | None]:
        """Return messages and tools for the template; the messages have what it would omit."""
        format = self.format or support.format or _FALLBACK
        if not support.writes_calls:
            messages = _with_calls(messages, format)
        if self.shown is None or self.format is None or support.reads_tools:
            return messages, self.shown
        return _with_tools(messages, self.shown, format), None


class MessageReader:
    """Reads an output as pieces of a message.

    Attributes:
        has_called: True once a tool call has started.
    """

    def __init__(self, use: ToolUse) -> None:
        self.has_called = False
        self._parser = None if use.format is None else use.format.parser(use.names)

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """Add text; return the pieces that later text cannot change."""
        if self._parser is None:
            return [TextPiece(text)] if text else []
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.finish()
        self.has_called = self.has_called or any(isinstance(p, CallPiece) for p in pieces)
        return pieces


@dataclass(frozen=True)
class AskedTools:
    """The tools of a request.

    Attributes:
        content: JSON schema of the content of an output without calls; None for any text.
        content_field: the field with this schema.
    """

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None
    parallel: bool = True
    content: Mapping[str, Any] | None = None
    content_field: str = "response_format"

    def use(self, support: ChatSupport) -> ToolUse:
        """Return how a model uses the tools.

        Raises:
            ApiError: the choice names no tool, or the model's calls have no known format.
        """
        allowed, is_forced, is_named = self._allowed()
        if not self.tools:
            return ToolUse()
        shown = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if not allowed:
            return ToolUse(shown)
        format = support.format or (_FALLBACK if is_forced else None)
        if format is None or not (is_forced or support.reads_tools):
            raise ApiError(
                400,
                "The model's chat template shows no tools, or calls in an unknown format, so the "
                "model cannot choose a tool; give tool_choice='required' or a named tool, which "
                "needs no template, or have the operator give --tool-call-parser and "
                "--chat-template.",
                param="tools",
                code="tools_not_supported",
            )
        if self.content is not None and not (is_forced or format.opening):
            raise ApiError(
                400,
                f"In the format {format.name} a tool call looks like other JSON; give "
                f"{self.content_field} with tool_choice='none', or tools without it.",
                param=self.content_field,
            )
        fields = RequestFields()
        several = self.parallel and not is_named
        is_guided = is_forced or not several or len(allowed) < len(self.tools)
        is_strict = any(tool.function.strict for tool in allowed)
        if is_guided or is_strict or self.content is not None:
            guided = [GuidedTool(t.function.name, t.function.schema_of_arguments) for t in allowed]
            content = None if is_forced else self.content
            guide = CallGuide(guided, is_forced, several, content)
            try:
                fields["guided_grammar"] = guide.grammar(format, support.notation)
            except ValueError as error:
                of_content = "" if content is None else f" and of {self.content_field}"
                message = f"The schemas of the tools{of_content} are invalid: {error}"
                raise ApiError(400, message, param="tools") from error
        # Texts must include markers that are special tokens.
        if not support.notation.special.isdisjoint(format.markers):
            fields["skip_special_tokens"] = False
        names = tuple(tool.function.name for tool in allowed)
        return ToolUse(shown, names, is_named, format=format, fields=fields)

    def _allowed(self) -> tuple[list[Tool], bool, bool]:
        """Return the callable tools, whether a call is required, and whether it is named."""
        by_name = {tool.function.name: tool for tool in self.tools}
        if len(by_name) < len(self.tools):
            raise ApiError(400, "Two tools have the same name.", param="tools")
        choice = self.choice
        if not by_name and choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools; give some.", param="tool_choice")
        if isinstance(choice, NamedTool):
            return self._named([choice], by_name), True, True
        if isinstance(choice, AllowedToolsChoice):
            allowed = self._named(choice.allowed_tools.tools, by_name)
            return allowed, choice.allowed_tools.mode == "required", False
        if choice == "none":
            return [], False, False
        return list(self.tools), choice == "required", False

    def _named(self, chosen: Sequence[NamedTool], by_name: Mapping[str, Tool]) -> list[Tool]:
        names = list(dict.fromkeys(tool.function.name for tool in chosen))
        for name in names:
            if name not in by_name:
                message = f"tool_choice names {name!r}, and the tools are {', '.join(by_name)}."
                raise ApiError(400, message, param="tool_choice")
        return [by_name[name] for name in names]


def _with_tools(
    messages: PlainMessages, tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> PlainMessages:
    """Add the tools to the first message: at the end of a system message, at the start of a user's.

    Only before other roles, the tools become a system message, as not all templates have that role.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = format.written("<name of the function>", "<its arguments as a JSON object>")
    text = (
        f"You may call functions. These are their signatures:\n<tools>\n{listed}\n</tools>\n"
        f"To call a function, write:\n{call}"
    )
    first, *rest = messages
    match first["role"]:
        case "system" | "developer":
            return [_with_content(first, [first["content"], text]), *rest]
        case "user":
            return [_with_content(first, [text, first["content"]]), *rest]
        case _:
            return [{"role": "system", "content": text}, *messages]


def _with_calls(messages: PlainMessages, format: ToolFormat) -> PlainMessages:
    """Convert tool calls to texts of the assistant, and results to user messages.

    Consecutive results become a single message, as some templates require alternating roles.
    """
    changed: PlainMessages = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            content = ["<tool_response>", message["content"], "</tool_response>"]
            message = _with_content({"role": "user"}, content, between="\n")
            if follows_result:
                contents = [changed.pop()["content"], message["content"]]
                message = _with_content(message, contents, between="\n")
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [
                format.written(called["name"], json.dumps(called["arguments"], ensure_ascii=False))
                for called in functions
            ]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = _with_content(rest, [message["content"], *calls], between="\n")
        changed.append(message)
        follows_result = is_result
    return changed


def _with_content(
    message: dict[str, Any], contents: Sequence[str | list[dict[str, str]]], between: str = "\n\n"
) -> dict[str, Any]:
    texts = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in contents
    ]
    return {**message, "content": between.join(text for text in texts if text)}


@dataclass(frozen=True)
class GuidedTool:
    """A tool that an output may call, with the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class CallGuide:
    """The outputs that a request allows.

    Attributes:
        tools: the tools that may be called, at least one.
        is_forced: True if the output consists of calls.
        several: True if more than one call may occur.
        content: JSON schema of an output without calls; None for any text.
    """

    tools: Sequence[GuidedTool]
    is_forced: bool
    several: bool
    content: Mapping[str, Any] | None = None

    def grammar(self, format: ToolFormat, notation: Notation) -> str:
        """Return the grammar for a tool format.

        ValueError: an option of a schema is invalid.
        """
        if self.is_forced or self.content is not None:
            rules = self._calls(format, notation)
        else:
            rules = self._text_and_calls(format, notation)
        rules = ["%llguidance {}", *rules, f"group: {format.group('call', self.several)}"]
        rules += [f"call: {' | '.join(f'call_{i}' for i in range(len(self.tools)))}"]
        for i, tool in enumerate(self.tools):
            rules += [f"call_{i}: {format.call(tool.name, f'arguments_{i}', notation)}"]
            rules += [f"arguments_{i}: {_json_rule(tool.parameters)}"]
        return "\n".join(rules)

    def _calls(self, format: ToolFormat, notation: Notation) -> list[str]:
        unit, between = "group", format.between_units
        if format.opening:
            unit = f"{notation.marker(format.opening)} group"
        if self.several and between is not None:
            unit += f" ({json.dumps(between) if between else ''} {unit})*"
        if self.content is None:
            return [f"start: {unit}"]
        return [f"start: content | {unit}", f"content: {_json_rule(self.content)}"]

    def _text_and_calls(self, format: ToolFormat, notation: Notation) -> list[str]:
        # Added tokens such as <think>, which a regex of text does not match.
        free = notation.free_tokens(format.markers)
        more = f"(<[{','.join(map(str, free))}]> TEXT)*" if free else ""
        rules = [r"TEXT: /(.|\n)*/", f"text: TEXT {more}"]
        if not format.opening:
            begins = r"BEGINS: /([^{\s](.|\n)*)?/"
            return [*rules, begins, f"start: BEGINS {more} | group"]
        if format.opening in notation.tokens:
            rules += [f"led: text {notation.marker(format.opening)} group"]
        else:  # lazy: the text after the first opening is a call
            rules += [f"head[lazy]: TEXT {json.dumps(format.opening)}", "led: head group"]
        repeats = self.several and format.between_units is not None
        return [*rules, "start: led* text" if repeats else "start: text | led"]


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, OPTIONS: json_options(schema)})}"

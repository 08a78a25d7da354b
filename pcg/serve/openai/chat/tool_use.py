"""Tools of a chat.

Tools on the wire, as a chat's body has them.

Tools, calls and results as texts of messages, for chat templates that write none of them.

A template without tools would leave them out of the prompt without a word: a model that has to call
a tool would not know which there are, and one that called a tool would read a result of nothing.

The tools of one request: which the model is shown, which it may call, and whether it has to.

The chats that a server can serve: their template, the format of tool calls, what is allowed.
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
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.chat.tool_format import (
    CallGuide,
    GuidedTool,
    Notation,
    ToolFormat,
    ToolParser,
)
from pcg.serve.openai.chat.tool_formats import (
    FORMATS,
    format_of,
    reads_tools,
    writes_calls,
)
from pcg.serve.openai.sampling_fields import bare

# -------------------------------------------------------------------------------------------- tools


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
MOST_TOOLS = 128
"""As OpenAI's."""


class Function(WireModel):
    """A function that the model may call; without parameters it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments, without descriptions."""
        if self.parameters:
            found: dict[str, Any] = bare(self.parameters, "tools")
            return found
        return {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(WireModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionRef(WireModel):
    """A function's name."""

    name: FunctionName


class NamedTool(WireModel):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionRef


class AllowedTools(WireModel):
    """Some of the tools, and whether one has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedToolsChoice(WireModel):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


# -------------------------------------------------------------------------------------- tool prompt


Messages = list[dict[str, Any]]


def with_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> Messages:
    """Return messages of which the first, if it is a system's, ends with the tools.

    Without a system's message the first one begins with them, as not all templates have the role.
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


def with_calls(messages: Messages, format: ToolFormat) -> Messages:
    """Return messages whose tool calls are contents, and whose results are a user's.

    Results that follow each other are one message, as some templates have users and assistants
    take turns.
    """
    found: Messages = []
    is_behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            content = ["<tool_response>", message["content"], "</tool_response>"]
            message = _with_content({"role": "user"}, content, between="\n")
            if is_behind_result:
                contents = [found.pop()["content"], message["content"]]
                message = _with_content(message, contents, between="\n")
        elif "tool_calls" in message:
            message = _without_calls(message, format)
        found.append(message)
        is_behind_result = is_result
    return found


def _without_calls(message: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        format.written(one["name"], json.dumps(one["arguments"], ensure_ascii=False))
        for one in functions
    ]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return _with_content(rest, [message["content"], *calls], between="\n")


def _with_content(
    message: dict[str, Any], contents: Sequence[str | list[dict[str, str]]], between: str = "\n\n"
) -> dict[str, Any]:
    """Return a message of several contents, each a text or text parts."""
    texts = [
        one if isinstance(one, str) else "\n".join(part["text"] for part in one) for one in contents
    ]
    return {**message, "content": between.join(text for text in texts if text)}


# ----------------------------------------------------------------------------------------- tool use


_FALLBACK = FORMATS["hermes"]
"""The format of forced calls where the template shows none."""


@dataclass(frozen=True)
class ToolSupport:
    """The tools that a model can use.

    Attributes:
        given_format: the format that the operator names; None to see it in the template.
    """

    tokenizer: Tokenizer | None
    given_format: str | None = None

    @cached_property
    def format(self) -> ToolFormat | None:
        """The format of the model's calls; None if it is not known."""
        return format_of(self.tokenizer, self.given_format)

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
        """The notation of grammars for the tokenizer."""
        assert self.tokenizer is not None  # the template has made a prompt
        return Notation.of(self.tokenizer)

    def has_special(self, format: ToolFormat) -> bool:
        """Return True if a marker of a format is a special token, which texts leave out."""
        return not self.notation.special.isdisjoint(format.markers)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        shown: the tools that the template is given; None for none.
        names: the tools that may be called; none if the output is not searched for calls.
        is_named: True if the request names the one tool to call.
        fields: the guide of the output, and what its parser needs.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()
    is_named: bool = False
    format: ToolFormat | None = None
    fields: RequestFields = field(default_factory=RequestFields)

    def parser(self) -> ToolParser | None:
        """Return a parser of one output; None where no tool may be called."""
        return None if self.format is None else self.format.parser(self.names)


def shown_to(
    support: ToolSupport, messages: list[dict[str, Any]], use: ToolUse
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Return the messages and the tools that the template is given.

    What it does not write of tools is in the messages' contents.
    """
    format = use.format or support.format or _FALLBACK
    if not support.writes_calls:
        messages = with_calls(messages, format)
    if use.shown is None or use.format is None or support.reads_tools:
        return messages, use.shown
    return with_tools(messages, use.shown, format), None


@dataclass(frozen=True)
class AskedTools:
    """The tools of a request as it asks for them.

    Attributes:
        content: the JSON schema of the content beside calls; None for any text.
        content_field: the field that it is given in.
    """

    tools: Sequence[Tool]
    choice: ToolChoice | None
    parallel: bool
    content: Mapping[str, Any] | None = None
    content_field: str = "response_format"

    def use(self, support: ToolSupport) -> ToolUse:
        """Return how a model uses them.

        Raises:
            ApiError: the choice is none of the tools, or the model's calls have no known format.
        """
        allowed, is_forced, is_named = self._allowed()
        if not self.tools:
            return ToolUse()
        shown = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if not allowed:
            return ToolUse(shown)
        found = support.format
        if found is None and is_forced:
            found = _FALLBACK
        if found is None or not (is_forced or support.reads_tools):
            raise ApiError(
                400,
                "The model's chat template shows no tools, or calls in a form that is not known, "
                "so the model cannot choose a tool; give tool_choice='required' or a named tool, "
                "which needs no template, or have the operator give --tool-call-parser and "
                "--chat-template.",
                param="tools",
                code="tools_not_supported",
            )
        if self.content is not None and not (is_forced or found.opening):
            raise ApiError(
                400,
                f"In the format {found.name} a tool call cannot be told from other JSON; give "
                f"{self.content_field} with tool_choice='none', or tools without it.",
                param=self.content_field,
            )
        several = self.parallel and not is_named
        is_guided = (
            is_forced
            or not several
            or len(allowed) < len(self.tools)
            or self.content is not None
            or any(tool.function.strict for tool in allowed)
        )
        fields = RequestFields()
        if is_guided:
            guided = [GuidedTool(t.function.name, t.function.schema_of_arguments) for t in allowed]
            content = None if is_forced else self.content
            guide = CallGuide(guided, is_forced, several, content)
            try:
                fields["guided_grammar"] = guide.grammar(found, support.notation)
            except ValueError as error:
                where = "The schemas of the tools" + (
                    "" if content is None else f" and of {self.content_field}"
                )
                raise ApiError(400, f"{where} cannot be: {error}", param="tools") from error
        if support.has_special(found):
            fields["skip_special_tokens"] = False
        names = tuple(tool.function.name for tool in allowed)
        return ToolUse(shown, names, is_named, found, fields)

    def _allowed(self) -> tuple[list[Tool], bool, bool]:
        """Return the tools that may be called, if one has to be, and if the request names it."""
        by_name = {tool.function.name: tool for tool in self.tools}
        if len(by_name) < len(self.tools):
            raise ApiError(400, "Two tools have one name.", param="tools")
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
        names = list(dict.fromkeys(one.function.name for one in chosen))
        for name in names:
            if name not in by_name:
                raise ApiError(
                    400,
                    f"tool_choice names {name!r}, and the tools are {', '.join(by_name)}.",
                    param="tool_choice",
                )
        return [by_name[name] for name in names]


# ------------------------------------------------------------------------------------------ support


class ChatSupport:
    """The chats of one model.

    Args:
        tokenizer: None for a model without one.
        chat_template: a file with a template in place of the model's.
        tool_call_parser: the format of tool calls; None to see it in the template.
        trusts_templates: True if requests may bring templates.

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
        self.tools = ToolSupport(tokenizer, tool_call_parser)
        self.trusts_templates = trusts_templates

    @cached_property
    def knows_developer(self) -> bool:
        """True if the template has the role."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return False
        return any("developer" in one for one in self.tokenizer.chat_template.sources.values())

    @cached_property
    def reads_parts(self) -> bool:
        """True if the template writes contents that are lists of parts."""
        return self.tokenizer is not None and self.tokenizer.reads_parts()

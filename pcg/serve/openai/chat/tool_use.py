"""The tools of one request: which the model is shown, which it may call, and whether it has to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pcg.runtime.requests.request import RequestFields
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.errors import ApiError
from pcg.serve.openai.chat.tool_calls.formats import (
    FORMATS,
    format_of,
    reads_tools,
    writes_calls,
)
from pcg.serve.openai.chat.tool_calls.guide import CallGuide, GuidedTool
from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.pieces import ToolParser
from pcg.serve.openai.chat.tool_calls.tool_format import ToolFormat
from pcg.serve.openai.chat.tool_prompt import with_calls, with_tools
from pcg.serve.openai.chat.tools import AllowedToolsChoice, NamedTool, Tool, ToolChoice

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

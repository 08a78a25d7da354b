"""Guides of outputs with tool calls, as grammars in Lark's notation.

    forced     start: unit (sep unit)*                     tool_choice "required", or a named tool
    auto       start: text | text unit (text unit)*        a call, once begun, is one of the tools'
    schema     start: content | unit (sep unit)*           response_format beside tools

    unit       the format's opening, and a group of calls
    call       the format's text around `%json {the tool's parameters}`

Each tool's parameters are a schema of their own, so that references in them hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.runtime.guided.guide import OPTIONS, json_options
from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.tool_format import ToolFormat


@dataclass(frozen=True)
class GuidedTool:
    """A tool that an output may call.

    Attributes:
        parameters: the JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class CallGuide:
    """The outputs that may be.

    Attributes:
        tools: the tools that may be called, at least one.
        is_forced: True if the output is calls and nothing else.
        several: True if more than one call may come.
        content: the JSON schema of an output without calls; None for any text.
    """

    tools: Sequence[GuidedTool]
    is_forced: bool
    several: bool
    content: Mapping[str, Any] | None = None

    def grammar(self, format: ToolFormat, notation: Notation) -> str:
        """Return the grammar for the outputs of a model that writes this format.

        ValueError: the options of a schema cannot be.
        """
        lines = ["%llguidance {}"]
        if self.is_forced or self.content is not None:
            lines += self._calls(format, notation)
        else:
            lines += self._text_and_calls(format, notation)
        lines += [f"group: {format.group('call', self.several, notation)}"]
        lines += [f"call: {' | '.join(f'call_{i}' for i in range(len(self.tools)))}"]
        for i, tool in enumerate(self.tools):
            lines += [f"call_{i}: {format.call(tool.name, f'arguments_{i}', notation)}"]
            lines += [f"arguments_{i}: {_json(tool.parameters)}"]
        return "\n".join(lines)

    def _calls(self, format: ToolFormat, notation: Notation) -> list[str]:
        """Return the rules of an output that is calls, or else the content."""
        unit, between = "group", format.between_units
        if format.opening:
            unit = f"{notation.marker(format.opening)} group"
        if self.several and between is not None:
            unit += f" ({notation.text(between) if between else ''} {unit})*"
        if self.content is None:
            return [f"start: {unit}"]
        return [f"start: content | {unit}", f"content: {_json(self.content)}"]

    def _text_and_calls(self, format: ToolFormat, notation: Notation) -> list[str]:
        """Return the rules of an output that is free until a call begins."""
        # Tokens as <think>, which no text can spell.
        free = notation.free_tokens(format.markers)
        more = f"(<[{','.join(map(str, free))}]> TEXT)*" if free else ""
        rules = [r"TEXT: /(.|\n)*/", f"text: TEXT {more}"]
        if not format.opening:
            begins = r"BEGINS: /([^{\s](.|\n)*)?/"
            return [*rules, begins, f"start: BEGINS {more} | group"]
        if notation.is_token(format.opening):
            rules += [f"led: text {notation.marker(format.opening)} group"]
        else:  # lazy: what is behind the first opening is a call
            rules += [f"head[lazy]: TEXT {notation.text(format.opening)}", "led: head group"]
        repeats = self.several and format.between_units is not None
        return [*rules, "start: led* text" if repeats else "start: text | led"]


def _json(schema: Mapping[str, Any]) -> str:
    """Return the rule of JSON of a schema."""
    return f"%json {json.dumps({**schema, OPTIONS: json_options(schema)})}"

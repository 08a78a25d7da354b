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

from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.tool_format import ToolFormat

_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Arguments are written as templates show them; and no output goes on with white space for ever."""


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
        """Return the grammar for the outputs of a model that writes this format."""
        between = format.between_units
        repeats = self.several and between is not None
        lines = ["%llguidance {}"]
        if self.is_forced or self.content is not None:
            opening = notation.marker(format.opening) if format.opening else ""
            unit = f"{opening} group"
            more = f"({notation.text(between)} {unit})*" if repeats and between else ""
            if repeats and not between:
                more = f"({unit})*"
            content = "" if self.content is None else "content | "
            lines += [f"start: {content}{unit} {more}"]
            if self.content is not None:
                lines += [f"content: %json {json.dumps(self.content)}"]
        elif not format.opening:
            lines += ["start: TEXT | group", r"TEXT: /([^{\s](.|\n)*)?/"]
        else:
            if notation.is_token(format.opening):
                lines += [f"led: TEXT {notation.marker(format.opening)} group"]
            else:  # lazy: what is behind the first opening is a call
                lines += [f"head[lazy]: TEXT {notation.text(format.opening)}", "led: head group"]
            lines += ["start: led* TEXT" if repeats else "start: TEXT | led", r"TEXT: /(.|\n)*/"]
        lines += [f"group: {format.group('call', self.several, notation)}"]
        lines += [f"call: {' | '.join(f'call_{i}' for i in range(len(self.tools)))}"]
        for i, tool in enumerate(self.tools):
            lines += [f"call_{i}: {format.call(tool.name, f'arguments_{i}', notation)}"]
            schema = {**tool.parameters, "x-guidance": _ON_ONE_LINE}
            lines += [f"arguments_{i}: %json {json.dumps(schema)}"]
        return "\n".join(lines)

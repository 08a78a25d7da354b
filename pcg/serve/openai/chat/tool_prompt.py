"""Tools, calls and results as texts of messages, for chat templates that write none of them.

A template without tools would leave them out of the prompt without a word: a model that has to call
a tool would not know which there are, and one that called a tool would read a result of nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.serve.openai.chat.tool_calls.tool_format import ToolFormat

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

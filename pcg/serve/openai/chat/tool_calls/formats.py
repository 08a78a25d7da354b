"""The formats of tool calls: which there are, and which one a model's template shows."""

from __future__ import annotations

import re
from typing import Any

from pcg.errors import GenerationError
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.openai.chat.tool_calls.hermes import Hermes
from pcg.serve.openai.chat.tool_calls.llama3 import Llama3
from pcg.serve.openai.chat.tool_calls.mistral import Mistral
from pcg.serve.openai.chat.tool_calls.tool_format import ToolFormat

FORMATS: dict[str, ToolFormat] = {one.name: one for one in (Hermes(), Llama3(), Mistral())}
"""The formats by their names on the command line, which are vLLM's."""

_NAME, _VALUE = "probe_the_format", "of a tool call"
_ARGUMENTS = {"probe": _VALUE}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Shows how calls are written.",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string"}},
            "required": ["probe"],
        },
    },
}
_CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": _NAME, "arguments": _ARGUMENTS},
}
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "done", "tool_call_id": "a1b2c3d4e", "name": _NAME},
]

_JSON = r'\{\s*"probe":\s*"of a tool call"\s*\}'
_SHOWN: tuple[tuple[str, ToolFormat], ...] = (
    (rf'<tool_call>\s*\{{\s*"name":\s*"{_NAME}",\s*"arguments":\s*{_JSON}', Hermes()),
    (rf'\[TOOL_CALLS\]\s*\[\s*\{{\s*"name":\s*"{_NAME}",\s*"arguments":\s*{_JSON}', Mistral()),
    (rf"\[TOOL_CALLS\]\s*{_NAME}\s*(\[CALL_ID\]\w+)?(\[ARGS\])?\s*{_JSON}", Mistral(by_name=True)),
    (rf'\{{\s*"name":\s*"{_NAME}",\s*"parameters":\s*{_JSON}', Llama3()),
)
"""Patterns of a call as templates write it, and the format that each is."""


def format_of(tokenizer: Tokenizer | None, name: str | None = None) -> ToolFormat | None:
    """Return the format of a model's tool calls.

    Args:
        name: the name of a format, where the operator gives one.
    Returns:
        The format; None if the template shows none that is known.
    """
    shown = None if tokenizer is None else _shown(tokenizer)
    if name is None or (shown is not None and shown.name == name):
        return shown
    return FORMATS[name]


def reads_tools(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template writes the tools of a request into the prompt."""
    return any(_NAME in text for text in _rendered(tokenizer, _PROBE[:1]))


def writes_calls(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template writes the calls of an assistant's message."""
    return any(_VALUE in text for text in _rendered(tokenizer, _PROBE))


def _shown(tokenizer: Tokenizer) -> ToolFormat | None:
    for text in _rendered(tokenizer, _PROBE):
        for pattern, found in _SHOWN:
            if re.search(pattern, text):
                return found
    return None


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """Return a chat as the template writes it; nothing where it has no such messages."""
    if tokenizer.chat_template is None:
        return []
    try:
        return [tokenizer.render_chat(messages, add_generation_prompt=False, tools=[_TOOL])]
    except GenerationError:
        return []

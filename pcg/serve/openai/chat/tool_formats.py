"""The formats of tool calls that models write.

Calls between tags, as Hermes and Qwen write them.

<tool_call>
{"name": "search", "arguments": {"query": "…"}}
</tool_call>

Calls as the whole output, as Llama 3 writes them.

    {"name": "search", "parameters": {"query": "…"}}

Several are separated by semicolons, and <|python_tag|> may stand before the first. JSON that calls
none of the tools is content.

Calls behind a marker, as Mistral's models write them.

    [TOOL_CALLS] [{"name": "search", "arguments": {"query": "…"}}]     a list, the first ones
    [TOOL_CALLS]search[ARGS]{"query": "…"}                             by name, the later ones

The parser reads both; a guide has the output written as the model's template shows it.

The formats of tool calls: which there are, and which one a model's template shows.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from pcg.errors import GenerationError
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.openai.chat.tool_format import (
    MOST_SPACE,
    HeldText,
    JsonCall,
    Notation,
    Piece,
    TextPiece,
    ToolFormat,
)

# ------------------------------------------------------------------------------------------- hermes


_BEGIN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Hermes:
    """The format of Hermes and Qwen."""

    name: ClassVar[str] = "hermes"
    opening: ClassVar[str] = _BEGIN
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _CLOSE)
    between_units: ClassVar[str | None] = "\n"

    def new_call_id(self) -> str:
        """Return an id, of OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"

    def parser(self, names: Collection[str]) -> HermesParser:
        """Return a parser of one output; what stands between tags may call any name."""
        return HermesParser()

    def written(self, name: str, arguments: str) -> str:
        """Return the text of one call between its tags."""
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{_BEGIN}\n{{"name": {quoted}, "arguments": {arguments}}}\n{_CLOSE}'

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        """Return the rule of one call, behind its opening tag."""
        head = notation.text(f'\n{{"name": {notation.json_text(name)}, "arguments": ')
        return f"{head} {arguments} {notation.text('}' + chr(10))} {notation.marker(_CLOSE)}"

    def group(self, call: str, several: bool, notation: Notation) -> str:
        """Return the rule of a group: each call has tags of its own."""
        return call


class HermesParser:
    """Finds calls between tags."""

    def __init__(self) -> None:
        self._text = HeldText(_BEGIN)
        self._end = HeldText(_CLOSE)
        self._call: JsonCall | None = None
        self._raw = ""
        self._has_called = False

    def push(self, text: str) -> list[Piece]:
        """Add a part of the text; returns the pieces that are certain now."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if self._call is None:
                said, rest = self._text.push(rest)
                if said:
                    pieces.append(TextPiece(said))
                if rest is not None:
                    self._call, self._raw = JsonCall(), ""
            else:
                rest = self._push_call(self._call, rest, pieces)
        return pieces

    def _push_call(self, call: JsonCall, text: str, pieces: list[Piece]) -> str | None:
        """Read a call; returns the text behind it, None while it goes on."""
        read = call.push(text)
        if not call.begun:
            self._raw += text[:read]
        pieces += call.take()
        self._has_called |= call.begun
        text = text[read:]
        if call.is_broken and not call.begun:  # no call, so what was written is the content
            self._call = None
            pieces.append(TextPiece(self._written))
            return text
        if not (call.is_done or call.is_broken):
            return None
        _, behind = self._end.push(text)
        if behind is None:
            return None
        self._call = None
        return behind

    def finish(self) -> list[Piece]:
        """End the text; returns what was held back."""
        held = ""
        if self._call is None:
            held = self._text.finish()
            if self._has_called and held.isspace():
                held = ""
        elif not self._call.begun:
            held = self._written
        return [TextPiece(held)] if held else []

    @property
    def _written(self) -> str:
        """The text that was written in place of a call."""
        return self._text.space + _BEGIN + self._raw


# ------------------------------------------------------------------------------------------- llama3


_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Llama3:
    """The format of Llama 3."""

    name: ClassVar[str] = "llama3_json"
    opening: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = (_TAG,)
    between_units: ClassVar[str | None] = None

    def new_call_id(self) -> str:
        """Return an id, of OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"

    def parser(self, names: Collection[str]) -> Llama3Parser:
        """Return a parser of one output."""
        return Llama3Parser(names)

    def written(self, name: str, arguments: str) -> str:
        """Return the text of one call."""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {arguments}}}'

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        """Return the rule of one call."""
        head = notation.text(f'{{"name": {notation.json_text(name)}, "parameters": ')
        return f"{head} {arguments} {notation.text('}')}"

    def group(self, call: str, several: bool, notation: Notation) -> str:
        """Return the rule of a group."""
        return f"{call} ({notation.text('; ')} {call})*" if several else call


class Llama3Parser:
    """Finds calls at the beginning of an output."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._call: JsonCall | None = None
        self._raw = ""
        self._is_content = False
        self._has_called = False

    def push(self, text: str) -> list[Piece]:
        """Add a part of the text; returns the pieces that are certain now."""
        pieces: list[Piece] = []
        while text:
            if self._is_content:
                pieces.append(TextPiece(text))
                break
            if self._call is None:
                text = self._find(text)
            else:
                text = self._push_call(self._call, text, pieces)
        return pieces

    def _find(self, text: str) -> str:
        """Look for the beginning of a call; returns the text that is left to read."""
        self._raw += text
        stripped = self._raw.lstrip()
        if len(self._raw) - len(stripped) > MOST_SPACE:
            return self._content()
        if self._has_called:
            stripped = stripped.removeprefix(";").lstrip()
        elif _TAG.startswith(stripped):
            return ""  # a tag, or what may become one
        else:
            stripped = stripped.removeprefix(_TAG).lstrip()
        if len(self._raw) - len(stripped) > 2 * MOST_SPACE:  # between a tag or a call and the next
            return self._content()
        if not stripped:
            return ""
        if stripped[0] == "{":
            self._call = JsonCall(self._names)
            self._raw = self._raw[: len(self._raw) - len(stripped)]
            return stripped
        return self._content()

    def _content(self) -> str:
        """Read all as content from now on; returns what was held back."""
        self._is_content = True
        raw, self._raw = self._raw, ""
        return raw

    def _push_call(self, call: JsonCall, text: str, pieces: list[Piece]) -> str:
        read = call.push(text)
        if not call.begun:
            self._raw += text[:read]
        pieces += call.take()
        text = text[read:]
        if call.begun:
            self._raw, self._has_called = "", True
        if call.is_broken and not call.begun:
            return self._content() + text
        if call.is_done or call.is_broken:
            self._call = None
        return text

    def finish(self) -> list[Piece]:
        """End the text; returns what was held back."""
        raw, self._raw = self._raw, ""
        if not raw or (self._has_called and raw.strip() in ("", ";")):
            return []
        return [TextPiece(raw)]


# ------------------------------------------------------------------------------------------ mistral


_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits
_LONGEST_HEAD = 512
"""Characters of a name and an id."""


@dataclass(frozen=True)
class Mistral:
    """The format of Mistral's models.

    Attributes:
        by_name: True if the template writes names before arguments.
    """

    by_name: bool = False
    name: ClassVar[str] = "mistral"
    opening: ClassVar[str] = _CALLS
    markers: ClassVar[tuple[str, ...]] = (_CALLS, _ARGS, _ID)

    @property
    def between_units(self) -> str | None:
        """The text between two units; None where an output has one list."""
        return "" if self.by_name else None

    def new_call_id(self) -> str:
        """Return an id of nine letters and digits, as the templates demand."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def parser(self, names: Collection[str]) -> MistralParser:
        """Return a parser of one output."""
        return MistralParser()

    def written(self, name: str, arguments: str) -> str:
        """Return the text of one call behind the marker."""
        if self.by_name:
            return f"{_CALLS}{name}{_ARGS}{arguments}"
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{_CALLS}[{{"name": {quoted}, "arguments": {arguments}}}]'

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        """Return the rule of one call."""
        if self.by_name:
            return f"{notation.text(name)} {notation.marker(_ARGS)} {arguments}"
        head = notation.text(f'{{"name": {notation.json_text(name)}, "arguments": ')
        return f"{head} {arguments} {notation.text('}')}"

    def group(self, call: str, several: bool, notation: Notation) -> str:
        """Return the rule of a group: a list, or the one call behind its marker."""
        if self.by_name:
            return call
        more = f"({notation.text(', ')} {call})*" if several else ""
        return f"{notation.text('[')} {call} {more} {notation.text(']')}"


class MistralParser:
    """Finds calls behind the marker."""

    def __init__(self) -> None:
        self._text = HeldText(_CALLS)
        self._unit: _List | _Named | None = None
        self._head = ""
        self._is_open = False
        self._has_called = False

    def push(self, text: str) -> list[Piece]:
        """Add a part of the text; returns the pieces that are certain now."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if not self._is_open:
                said, rest = self._text.push(rest)
                if said:
                    pieces.append(TextPiece(said))
                if rest is not None:
                    self._is_open, self._unit, self._head = True, None, ""
            elif self._unit is None:
                rest = self._begin(rest, pieces)
            else:
                rest = self._push_unit(self._unit, rest, pieces)
        return pieces

    def _begin(self, text: str, pieces: list[Piece]) -> str | None:
        """Tell a list from a name; returns the text to read then."""
        self._head += text
        stripped = self._head.lstrip()
        if len(self._head) - len(stripped) > MOST_SPACE:  # no call
            self._is_open = False
            said, behind = self._head[: MOST_SPACE + 1], self._head[MOST_SPACE + 1 :]
            pieces.append(TextPiece(self._text.space + _CALLS + said))
            return behind
        if not stripped:
            return None
        self._unit = _List() if stripped[0] in "[{" else _Named()
        self._unit.raw = self._head[: len(self._head) - len(stripped)]
        return stripped

    def _push_unit(self, unit: _List | _Named, text: str, pieces: list[Piece]) -> str | None:
        behind = unit.push(text, pieces)
        self._has_called |= unit.begun
        if unit.is_broken and not unit.begun:
            self._is_open = False
            pieces.append(TextPiece(self._text.space + _CALLS + unit.raw))
        elif unit.is_over:
            self._is_open = False
        return behind if not self._is_open else None

    def finish(self) -> list[Piece]:
        """End the text; returns what was held back."""
        held = self._text.finish()
        if self._is_open:
            begun = self._unit is not None and self._unit.begun
            raw = self._head if self._unit is None else self._unit.raw
            held = "" if begun else self._text.space + _CALLS + raw
        elif self._has_called and held.isspace():
            held = ""
        return [TextPiece(held)] if held else []


class _List:
    """A list of calls, or one call without the list's brackets."""

    def __init__(self) -> None:
        self.raw = ""
        self.begun = self.is_broken = self.is_over = False
        self._call: JsonCall | None = None
        self._in_list = False
        self._is_after = False

    def push(self, text: str, pieces: list[Piece]) -> str:
        """Read text; returns what is behind the list."""
        while text and not (self.is_over or self.is_broken):
            if self._call is None:
                text = self._between(text)
                continue
            read = self._call.push(text)
            if not self.begun:
                self.raw += text[:read]
            pieces += self._call.take()
            self.begun |= self._call.begun
            text = text[read:]
            self.is_broken = self._call.is_broken
            if self._call.is_done:
                self._call, self._is_after = None, True
                self.is_over = not self._in_list
        return text

    def _between(self, text: str) -> str:
        character = text[0]
        if character == "{":
            self._call = JsonCall()
            return text
        if not self.begun:
            self.raw += character
        if character == "[" and not (self._in_list or self.begun):
            self._in_list = True
        elif character == "]" and self._in_list:
            self.is_over, self.is_broken = self.begun, not self.begun
        elif not (character.isspace() or (character == "," and self._is_after)):
            self.is_broken = True
        return text[1:]


class _Named:
    """A name, an id perhaps, and arguments."""

    def __init__(self) -> None:
        self.raw = ""
        self.begun = self.is_broken = self.is_over = False
        self._call: JsonCall | None = None

    def push(self, text: str, pieces: list[Piece]) -> str:
        """Read text; returns what is behind the arguments."""
        if self._call is None:
            self.raw += text
            head, brace, _ = self.raw.partition("{")
            if not brace:
                self.is_broken = len(head) > _LONGEST_HEAD
                return ""
            name = head.partition(_ARGS)[0].partition(_ID)[0].strip()
            if not name or any(c.isspace() for c in name):
                self.is_broken = True
                return ""
            # As the object that the other formats write, so that one reader finds its end.
            self._call = JsonCall()
            self._call.push(f'{{"name": {json.dumps(name)}, "arguments": ')
            text = self.raw[len(head) :]
        read = 0
        while read < len(text) and not self.is_over:
            self._call.push(text[read])
            self.is_over = self._call.has_all_arguments
            read += 1
        pieces += self._call.take()
        self.begun |= self._call.begun
        return text[read:]


# ------------------------------------------------------------------------------------------ formats


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

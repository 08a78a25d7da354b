"""Formats of tool calls: parsers of outputs, rules of grammars, detection in templates.

hermes        <tool_call>
              {"name": "search", "arguments": {"query": "…"}}
              </tool_call>
llama3_json   {"name": "search", "parameters": {"query": "…"}}
mistral       [TOOL_CALLS] [{"name": "search", "arguments": {"query": "…"}}]
              [TOOL_CALLS]search[ARGS]{"query": "…"}

Llama 3 writes calls as the whole output, separated by semicolons, optionally after <|python_tag|>;
JSON that calls no tool is content. Both forms of Mistral are parsed.

Parsers accept text in parts of any size. Once the name is known, arguments are passed on as
written, without being parsed, so a truncated output has the start of its arguments.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from pcg.errors import GenerationError
from pcg.runtime.text.tokenizer import Tokenizer

MOST_SPACE = 1024
"""The most white space that is held back or precedes a call, characters. Without a limit, endless
white space would make the parsing of each further token slower."""
_LONGEST_NAME = 256
_LONGEST_HEAD = 512
"""Maximum characters of a name and id in Mistral's format."""
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The start of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """Further text of the last call's arguments."""

    text: str


Piece: TypeAlias = TextPiece | CallPiece | ArgumentsPiece


class ToolParser(Protocol):
    """Parses the tool calls of an output."""

    def push(self, text: str) -> list[Piece]:
        """Add text; return the pieces that later text cannot change."""
        ...

    def finish(self) -> list[Piece]:
        """End the text; return the pieces of the text that was held back."""
        ...


class HeldText:
    """Splits a stream of text at a marker, holding back a possible start of the marker.

    Attributes:
        space: white space before the last marker, up to `MOST_SPACE` characters.
    """

    def __init__(self, marker: str) -> None:
        self.space = ""
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text before a possible marker, and after a marker (else None)."""
        text = self._held + text
        before, marker, behind = text.partition(self._marker)
        if marker:
            safe = _without_space(before)
            self._held, self.space = "", before[safe:]
            return before[:safe], behind
        lengths = range(min(len(text), len(self._marker) - 1), 0, -1)
        overlap = next((n for n in lengths if text.endswith(self._marker[:n])), 0)
        safe = _without_space(text[: len(text) - overlap])
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _without_space(text: str) -> int:
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


class JsonCall:
    """Parses the JSON object of a call character by character.

    Args:
        names: the names that a call may have; None for any.
    Attributes:
        begun: True once the call's name was passed on.
        is_done: True after the object's closing brace.
        is_broken: True if the text is not a call.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.begun = self.is_done = self.is_broken = False
        self._names = names
        self._expected = "{"  # "{", "key", ":", "value" or ","
        self._inside = False  # inside a key or a value
        self._depth = 0
        self._in_string = self._escaped = False
        self._text: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = self._passes_on = self._keeps = False

    @property
    def has_all_arguments(self) -> bool:
        return self._has_arguments and self._expected == "," and not self.is_broken

    def push(self, text: str) -> int:
        for index, character in enumerate(text):
            if self.is_done or self.is_broken:
                return index
            self._step(character)
        return len(text)

    def take(self) -> list[Piece]:
        pieces: list[Piece] = []
        if not self.begun and self._name is not None and (self._has_arguments or self.is_done):
            self.begun = True
            pieces.append(CallPiece(self._name))
            if not self._has_arguments:
                self._arguments.append("{}")
        if self.begun and self._arguments:
            pieces.append(ArgumentsPiece("".join(self._arguments)))
            self._arguments.clear()
        return pieces

    def _step(self, character: str) -> None:
        if self._inside:
            self._read(character)
            return
        if character in _SPACE:
            return
        match self._expected, character:
            case "{", "{":
                self._expected = "key"
            case "key", '"':
                self._passes_on, self._keeps = False, True
                self._begin(character)
            case ":", ":":
                self._expected = "value"
            case "value", _ if character not in "}],:":
                is_arguments = self._key in ("arguments", "parameters") and not self._has_arguments
                self._passes_on = is_arguments and character != '"'
                self._keeps = self._key == "name" or is_arguments
                self._has_arguments |= self._passes_on
                self._begin(character)
            case ",", ",":
                self._expected = "key"
            case ",", "}" if self._name is not None:
                self.is_done = True
            case _:
                self.is_broken = True

    def _begin(self, character: str) -> None:
        self._inside, self._text, self._depth = True, [], 0
        self._in_string = self._escaped = False
        self._read(character)

    def _read(self, character: str) -> None:
        """Read a character of a key or a value; brackets and quotes determine its end."""
        if not self._in_string and self._depth == 0 and character in ",}" + _SPACE:
            self._end()  # after a number or a word
            self._step(character)
            return
        if self._passes_on:
            self._arguments.append(character)
        elif self._keeps:
            self._text.append(character)
        if self._in_string:
            if self._escaped or character != '"':
                self._escaped = not self._escaped and character == "\\"
                return
            self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        else:
            return
        if not self._in_string and self._depth <= 0:
            self._end()

    def _end(self) -> None:
        self._inside, text = False, "".join(self._text)
        if self._expected == "key":
            self._key, self._expected = _string(text) or "?", ":"
            return
        self._expected = ","
        if self._key == "name":
            name = self._name = _string(text)
            is_known = self._names is None or name in self._names
            self.is_broken = not name or len(name) > _LONGEST_NAME or not is_known
        elif self._keeps and not self._passes_on:  # arguments as JSON in a string
            self._has_arguments = True
            self._arguments.append(_string(text) or "{}")


def _string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class _Unit(ABC):
    """The calls after a marker.

    Attributes:
        raw: the text read before the first call started.
        begun: True once a call has started.
        is_broken: True if the text is not a call.
        is_over: True after the last call.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.begun = self.is_broken = self.is_over = False

    @abstractmethod
    def push(self, text: str, pieces: list[Piece]) -> str:
        """Read text and add its pieces; return the text after the unit."""

    def _read(self, call: JsonCall, text: str, pieces: list[Piece]) -> str:
        count = call.push(text)
        if not self.begun:
            self.raw += text[:count]
        pieces += call.take()
        self.begun |= call.begun
        self.is_broken = call.is_broken
        return text[count:]


class _MarkedParser:
    """Parses the calls after markers."""

    def __init__(self, marker: str, unit: type[_Unit]) -> None:
        self._marker = marker
        self._text = HeldText(marker)
        self._new_unit = unit
        self._unit: _Unit | None = None
        self._has_called = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if self._unit is None:
                content, rest = self._text.push(rest)
                if content:
                    pieces.append(TextPiece(content))
                if rest is not None:
                    self._unit = self._new_unit()
                continue
            unit = self._unit
            behind = unit.push(rest, pieces)
            self._has_called |= unit.begun
            if unit.is_broken and not unit.begun:  # not a call: the text is content
                pieces.append(TextPiece(self._written(unit)))
                self._unit = None
            elif unit.is_over:
                self._unit = None
            rest = behind if self._unit is None else None
        return pieces

    def finish(self) -> list[Piece]:
        held = self._text.finish()
        if self._unit is not None:
            held = "" if self._unit.begun else self._written(self._unit)
        elif self._has_called and held.isspace():
            held = ""
        return [TextPiece(held)] if held else []

    def _written(self, unit: _Unit) -> str:
        return self._text.space + self._marker + unit.raw


@dataclass(frozen=True)
class Notation:
    """Writes texts and markers as parts of rules for a tokenizer.

    Attributes:
        tokens: ids of added tokens, which rules for text do not match.
        special: the added tokens that decoded texts omit, such as the end of a turn.
    """

    tokens: dict[str, int]
    special: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Notation:
        added = tokenizer.backend.get_added_tokens_decoder()
        special = frozenset(token.content for token in added.values() if token.special)
        return cls({token.content: index for index, token in added.items()}, special)

    def free_tokens(self, markers: Collection[str]) -> list[int]:
        """Return the added tokens that a text may contain: neither special nor markers."""
        excluded = {*self.special, *markers}
        return sorted(index for text, index in self.tokens.items() if text not in excluded)

    def marker(self, text: str) -> str:
        return f"<[{self.tokens[text]}]>" if text in self.tokens else json.dumps(text)


class ToolFormat(ABC):
    """The format of a family of models. An output with calls is text, then units.

    Attributes:
        name: vLLM's name of the format, for the command line.
        opening: the marker before calls; "" if an output starts with a call.
        markers: all markers, which may be special tokens.
        key: the key of the arguments.
    """

    name: ClassVar[str]
    opening: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]]
    key: ClassVar[str] = "arguments"

    @property
    def between_units(self) -> str | None:
        """The text between two units; None if an output has a single unit."""
        return None

    def new_call_id(self) -> str:
        """Return an id that the model's template accepts; by default in OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def parser(self, names: Collection[str]) -> ToolParser:
        """Return a parser of an output with tools of these names."""

    def written(self, name: str, arguments: str) -> str:
        """Return the text of a call with its opening; the arguments are JSON."""
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{{"name": {quoted}, "{self.key}": {arguments}}}'

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        """Return the rule of a call without the opening, around the rule of its arguments."""
        quoted = json.dumps(name, ensure_ascii=False)
        head = json.dumps(f'{{"name": {quoted}, "{self.key}": ')
        return f"{head} {arguments} {json.dumps('}')}"

    def group(self, call: str, several: bool) -> str:
        """Return the rule of a group of calls, or of a single call if not `several`."""
        return call


_BEGIN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Hermes(ToolFormat):
    """The format of Hermes and Qwen; the name in a call is not checked."""

    name: ClassVar[str] = "hermes"
    opening: ClassVar[str] = _BEGIN
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _CLOSE)

    @property
    def between_units(self) -> str | None:
        return "\n"

    def parser(self, names: Collection[str]) -> ToolParser:
        return _MarkedParser(_BEGIN, _HermesCall)

    def written(self, name: str, arguments: str) -> str:
        return f"{_BEGIN}\n{super().written(name, arguments)}\n{_CLOSE}"

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        rule = super().call(name, arguments, notation)
        return rf'"\n{rule[1:-1]}\n" {notation.marker(_CLOSE)}'


class _HermesCall(_Unit):
    def __init__(self) -> None:
        super().__init__()
        self._call = JsonCall()
        self._end = HeldText(_CLOSE)

    def push(self, text: str, pieces: list[Piece]) -> str:
        text = self._read(self._call, text, pieces)
        if self.is_broken and not self.begun:
            return text
        if not (self._call.is_done or self.is_broken):
            return ""
        _, behind = self._end.push(text)
        self.is_over = behind is not None
        return behind or ""


_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Llama3(ToolFormat):
    """The format of Llama 3."""

    name: ClassVar[str] = "llama3_json"
    markers: ClassVar[tuple[str, ...]] = (_TAG,)
    key: ClassVar[str] = "parameters"

    def parser(self, names: Collection[str]) -> ToolParser:
        return _Llama3Parser(names)

    def group(self, call: str, several: bool) -> str:
        return f'{call} ("; " {call})*' if several else call


class _Llama3Parser:
    """Parses calls at the start of an output."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._call: JsonCall | None = None
        self._raw = ""
        self._is_content = False
        self._has_called = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._is_content:
                pieces.append(TextPiece(text))
                break
            text = self._find(text) if self._call is None else self._push_call(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        raw, self._raw = self._raw, ""
        if not raw or (self._has_called and raw.strip() in ("", ";")):
            return []
        return [TextPiece(raw)]

    def _find(self, text: str) -> str:
        """Look for the start of a call; return the remaining text."""
        self._raw += text
        stripped = self._raw.lstrip()
        if len(self._raw) - len(stripped) > MOST_SPACE:
            return self._content()
        if self._has_called:
            stripped = stripped.removeprefix(";").lstrip()
        elif _TAG.startswith(stripped):
            return ""  # a tag, or the start of a tag
        else:
            stripped = stripped.removeprefix(_TAG).lstrip()
        if len(self._raw) - len(stripped) > 2 * MOST_SPACE:  # between a tag or a call and the next
            return self._content()
        if not stripped:
            return ""
        if stripped[0] != "{":
            return self._content()
        self._call = JsonCall(self._names)
        self._raw = self._raw[: len(self._raw) - len(stripped)]
        return stripped

    def _content(self) -> str:
        """Read everything as content from now on; return the text that was held back."""
        self._is_content = True
        raw, self._raw = self._raw, ""
        return raw

    def _push_call(self, text: str, pieces: list[Piece]) -> str:
        call = self._call
        assert call is not None
        count = call.push(text)
        if not call.begun:
            self._raw += text[:count]
        pieces += call.take()
        text = text[count:]
        if call.begun:
            self._raw, self._has_called = "", True
        if call.is_broken and not call.begun:
            return self._content() + text
        if call.is_done or call.is_broken:
            self._call = None
        return text


_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Mistral(ToolFormat):
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
        return "" if self.by_name else None

    def new_call_id(self) -> str:
        """Return an id of nine letters and digits, as the templates require."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def parser(self, names: Collection[str]) -> ToolParser:
        return _MarkedParser(_CALLS, _MistralCalls)

    def written(self, name: str, arguments: str) -> str:
        if self.by_name:
            return f"{_CALLS}{name}{_ARGS}{arguments}"
        return f"{_CALLS}[{super().written(name, arguments)}]"

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        if self.by_name:
            return f"{json.dumps(name)} {notation.marker(_ARGS)} {arguments}"
        return super().call(name, arguments, notation)

    def group(self, call: str, several: bool) -> str:
        """Return the rule of a list, or of a single call after its marker."""
        if self.by_name:
            return call
        more = f'(", " {call})*' if several else ""
        return f'"[" {call} {more} "]"'


class _MistralCalls(_Unit):
    """A list of calls, a call without the list's brackets, or a name and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._call: JsonCall | None = None
        self._is_named: bool | None = None
        self._in_list = self._is_after = False

    def push(self, text: str, pieces: list[Piece]) -> str:
        if self._is_named is None:
            head = self.raw + text
            stripped = head.lstrip()
            if len(head) - len(stripped) > MOST_SPACE:
                self.raw, self.is_broken = head[: MOST_SPACE + 1], True
                return head[MOST_SPACE + 1 :]
            self.raw = head[: len(head) - len(stripped)]
            if not stripped:
                return ""
            self._is_named, text = stripped[0] not in "[{", stripped
        return self._push_named(text, pieces) if self._is_named else self._push_list(text, pieces)

    def _push_list(self, text: str, pieces: list[Piece]) -> str:
        while text and not (self.is_over or self.is_broken):
            if self._call is not None:
                text = self._read(self._call, text, pieces)
                if self._call.is_done:
                    self._call, self._is_after = None, True
                    self.is_over = not self._in_list
                continue
            character = text[0]
            if character == "{":
                self._call = JsonCall()
                continue
            text = text[1:]
            if not self.begun:
                self.raw += character
            if character == "[" and not (self._in_list or self.begun):
                self._in_list = True
            elif character == "]" and self._in_list:
                self.is_over, self.is_broken = self.begun, not self.begun
            elif not (character.isspace() or (character == "," and self._is_after)):
                self.is_broken = True
        return text

    def _push_named(self, text: str, pieces: list[Piece]) -> str:
        if self._call is None:
            self.raw += text
            head, brace, _ = self.raw.partition("{")
            if not brace:
                self.is_broken = len(head) > _LONGEST_HEAD
                return ""
            name = head.partition(_ARGS)[0].partition(_ID)[0].strip()
            if not name or any(character.isspace() for character in name):
                self.is_broken = True
                return ""
            # Convert to the object of the other formats, so that JsonCall finds its end.
            self._call = JsonCall()
            self._call.push(f'{{"name": {json.dumps(name)}, "arguments": ')
            text = self.raw[len(head) :]
        count = 0
        while count < len(text) and not self.is_over:
            self._call.push(text[count])
            self.is_over = self._call.has_all_arguments
            count += 1
        pieces += self._call.take()
        self.begun |= self._call.begun
        return text[count:]


FORMATS: dict[str, ToolFormat] = {each.name: each for each in (Hermes(), Llama3(), Mistral())}
"""Formats by vLLM's names, for the command line."""

_NAME, _VALUE = "probe_the_format", "of a tool call"
_SCHEMA = {"type": "object", "properties": {"probe": {"type": "string"}}, "required": ["probe"]}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Shows how calls are written.",
        "parameters": _SCHEMA,
    },
}
_FUNCTION = {"name": _NAME, "arguments": {"probe": _VALUE}}
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": _FUNCTION}
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
"""Patterns of a call in rendered templates, with their formats."""


def format_of(tokenizer: Tokenizer | None, name: str | None = None) -> ToolFormat | None:
    """Return the format of a model's tool calls, or None if the template shows no known format.

    Args:
        name: the operator's format; None to detect the format.
    """
    texts = [] if tokenizer is None else _rendered(tokenizer, _PROBE)
    matches = (known for text in texts for pattern, known in _SHOWN if re.search(pattern, text))
    shown = next(matches, None)
    return shown if name is None or (shown is not None and shown.name == name) else FORMATS[name]


def reads_tools(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template writes the tools of a request into the prompt."""
    return any(_NAME in text for text in _rendered(tokenizer, _PROBE[:1]))


def writes_calls(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template writes the calls of assistant messages."""
    return any(_VALUE in text for text in _rendered(tokenizer, _PROBE))


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """Return the rendered chat as a list, or an empty list if the template refuses it."""
    if tokenizer.chat_template is None:
        return []
    try:
        return [tokenizer.render_chat(messages, add_generation_prompt=False, tools=[_TOOL])]
    except GenerationError:
        return []

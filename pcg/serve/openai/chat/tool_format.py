"""Formats of tool calls: what all of them share.

Pieces of an assistant's message, as a parser finds them in generated text.

Lark's notation of a model's texts and marker tokens, as grammars of tool calls use it.

Formats: how a family of models writes tool calls.

Text before a marker: what may be its beginning is held back, and white space before it.

One tool call as a JSON object, read while it is generated.

    {"name": "search", "arguments": {"query": "…"}}

The text of the arguments is handed on as the model writes it, once the name is known. It is not
parsed: an output that is cut off has the beginning of its arguments.

Guides of outputs with tool calls, as grammars in Lark's notation.

    forced     start: unit (sep unit)*                     tool_choice "required", or a named tool
    auto       start: text | text unit (text unit)*        a call, once begun, is one of the tools'
    schema     start: content | unit (sep unit)*           response_format beside tools

    unit       the format's opening, and a group of calls
    call       the format's text around `%json {the tool's parameters}`

Each tool's parameters are a schema of their own, so that references in them hold.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias

from pcg.runtime.sampling.guide import OPTIONS, json_options
from pcg.runtime.text.tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------- pieces


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The beginning of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """Further text of the arguments of the tool call that began last."""

    text: str


Piece: TypeAlias = TextPiece | CallPiece | ArgumentsPiece


class ToolParser(Protocol):
    """Finds the tool calls in one output, whose text comes in parts of any size."""

    def push(self, text: str) -> list[Piece]:
        """Add a part of the text; returns the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """End the text; returns what was held back."""
        ...


# ----------------------------------------------------------------------------------------- notation


@dataclass(frozen=True)
class Notation:
    """Notes texts for one tokenizer.

    Attributes:
        tokens: ids of the tokens that were added to the vocabulary, which no rule can spell.
        special: those that texts leave out, as the end of a turn.
    """

    tokens: dict[str, int]
    special: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Notation:
        """Return the notation for a tokenizer."""
        added = tokenizer.backend.get_added_tokens_decoder()
        special = frozenset(token.content for token in added.values() if token.special)
        return cls({token.content: index for index, token in added.items()}, special)

    def free_tokens(self, markers: Collection[str]) -> list[int]:
        """Return the tokens that may stand in a text: neither special nor among the markers."""
        kept_out = {*self.special, *markers}
        return sorted(index for text, index in self.tokens.items() if text not in kept_out)

    def text(self, text: str) -> str:
        """Return a text as a rule's part."""
        return json.dumps(text)

    def json_text(self, text: str) -> str:
        """Return the JSON of a text, as a part of a rule's text."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """Return a marker, as its token if it is one."""
        return f"<[{self.tokens[text]}]>" if text in self.tokens else self.text(text)

    def is_token(self, text: str) -> bool:
        """Return True if a marker is a token of its own."""
        return text in self.tokens


# -------------------------------------------------------------------------------------- tool format


class ToolFormat(Protocol):
    """The format of a family of models: a parser of outputs, and the rules of a grammar.

    An output with calls is text, then units. A unit is the opening and a group of calls.
    """

    @property
    def name(self) -> str:
        """Its name on the command line, which is vLLM's."""
        ...

    @property
    def opening(self) -> str:
        """The marker before calls; "" where an output begins with them."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, which may be special tokens."""
        ...

    @property
    def between_units(self) -> str | None:
        """The text between two units; None where an output has one."""
        ...

    def new_call_id(self) -> str:
        """Return an id that the model's template accepts."""
        ...

    def parser(self, names: Collection[str]) -> ToolParser:
        """Return a parser of one output with tools of these names."""
        ...

    def written(self, name: str, arguments: str) -> str:
        """Return the text of one call with its opening; the arguments are JSON."""
        ...

    def call(self, name: str, arguments: str, notation: Notation) -> str:
        """Return the rule of one call, behind the opening.

        Args:
            arguments: the rule of its arguments.
        """
        ...

    def group(self, call: str, several: bool, notation: Notation) -> str:
        """Return the rule of a group of calls, of one if not `several`."""
        ...


# ---------------------------------------------------------------------------------------- held text


MOST_SPACE = 1024
"""The characters of white space that are held back, or that stand before a call: a model that
writes nothing else would make the reading of each token longer and longer."""


class HeldText:
    """Splits a stream of text at a marker.

    Attributes:
        space: the white space before the marker that was found last.
    """

    def __init__(self, marker: str) -> None:
        self.space = ""
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what is certainly no marker, and what is behind one, None without.

        White space just before the marker is left out, and is `space`; of much of it, the end.
        """
        text = self._held + text
        before, found, behind = text.partition(self._marker)
        if found:
            safe = _without_space(before)
            self._held, self.space = "", before[safe:]
            return before[:safe], behind
        safe = _without_space(text[: len(text) - _overlap(text, self._marker)])
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """Return what is held back."""
        held, self._held = self._held, ""
        return held


def _without_space(text: str) -> int:
    """Return the length of a text without white space at its end."""
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that a marker may begin with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


# ---------------------------------------------------------------------------------------- json call


_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_LONGEST_NAME = 256


class _State(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    BEHIND_VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """The object of one call.

    Args:
        names: the names that a call may have; None for any.
    Attributes:
        begun: True once its name has been handed on.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.begun = False
        self._names = names
        self._state = _State.START
        self._name: str | None = None
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._hands_on = False
        self._keeps = False

    @property
    def is_done(self) -> bool:
        """True after the object's closing brace."""
        return self._state is _State.DONE

    @property
    def is_broken(self) -> bool:
        """True if the text is no call."""
        return self._state is _State.BROKEN

    @property
    def has_all_arguments(self) -> bool:
        """True behind the arguments' end."""
        return self._has_arguments and self._state is _State.BEHIND_VALUE

    def push(self, text: str) -> int:
        """Read text; returns how many characters were read, fewer than all at the call's end."""
        for place, character in enumerate(text):
            if self.is_done or self.is_broken:
                return place
            self._step(character)
        return len(text)

    def take(self) -> list[Piece]:
        """Return what is new of the call."""
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
        match self._state:
            case _State.IN_VALUE:
                self._read_value(character)
            case _State.IN_KEY:
                self._read_key(character)
            case _ if character in _SPACE:
                pass
            case _State.START:
                self._state = _State.KEY if character == "{" else _State.BROKEN
            case _State.KEY:
                self._begin_key(character)
            case _State.COLON:
                self._state = _State.VALUE if character == ":" else _State.BROKEN
            case _State.VALUE:
                self._begin_value(character)
            case _:
                self._behind_value(character)

    def _begin_key(self, character: str) -> None:
        if character == '"':
            self._state, self._value, self._escaped = _State.IN_KEY, [character], False
        elif character == "}" and not self._key:
            self._end()
        else:
            self._state = _State.BROKEN

    def _read_key(self, character: str) -> None:
        self._value.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._key = _string("".join(self._value)) or "?"
            self._state = _State.COLON

    def _begin_value(self, character: str) -> None:
        if character in "}],:":
            self._state = _State.BROKEN
            return
        self._state, self._value, self._escaped = _State.IN_VALUE, [], False
        self._depth, self._in_string = 0, False
        is_arguments = self._key in _ARGUMENTS and not self._has_arguments
        self._hands_on = is_arguments and character != '"'
        self._keeps = self._key == "name" or is_arguments
        self._has_arguments |= self._hands_on
        self._read_value(character)

    def _read_value(self, character: str) -> None:
        """Read a character of a value, whose end is found by brackets and quotes."""
        if self._in_string:
            self._keep(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self._end_value_outside()
        elif self._depth == 0 and character in ",}" + _SPACE:  # behind a number or a word
            self._end_value()
            if character not in _SPACE:
                self._behind_value(character)
        else:
            self._keep(character)
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self._end_value_outside()

    def _keep(self, character: str) -> None:
        if self._hands_on:
            self._arguments.append(character)
        elif self._keeps:
            self._value.append(character)

    def _end_value_outside(self) -> None:
        """End the value if what ended is no part of it."""
        if self._depth <= 0:
            self._end_value()

    def _end_value(self) -> None:
        self._state = _State.BEHIND_VALUE
        if self._key == "name":
            self._name = _string("".join(self._value))
            if not self._name or not self._may_be(self._name):
                self._state = _State.BROKEN
        elif self._keeps and not self._hands_on:  # arguments as JSON in a string
            self._has_arguments = True
            self._arguments.append(_string("".join(self._value)) or "{}")

    def _may_be(self, name: str) -> bool:
        return len(name) <= _LONGEST_NAME and (self._names is None or name in self._names)

    def _behind_value(self, character: str) -> None:
        if character == ",":
            self._state = _State.KEY
        elif character == "}":
            self._end()
        else:
            self._state = _State.BROKEN

    def _end(self) -> None:
        self._state = _State.BROKEN if self._name is None else _State.DONE


def _string(text: str) -> str | None:
    """Return the string that JSON text is; None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


# -------------------------------------------------------------------------------------------- guide


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

"""Calls behind a marker, as Mistral's models write them.

    [TOOL_CALLS] [{"name": "search", "arguments": {"query": "…"}}]     a list, the first ones
    [TOOL_CALLS]search[ARGS]{"query": "…"}                             by name, the later ones

The parser reads both; a guide has the output written as the model's template shows it.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from pcg.serve.openai.chat.tool_calls.held_text import MOST_SPACE, HeldText
from pcg.serve.openai.chat.tool_calls.json_call import JsonCall
from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.pieces import Piece, TextPiece

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
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
    opening: ClassVar[str] = _OPEN
    markers: ClassVar[tuple[str, ...]] = (_OPEN, _ARGS, _ID)

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
            return f"{_OPEN}{name}{_ARGS}{arguments}"
        return (
            f'{_OPEN}[{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}]'
        )

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
        self._text = HeldText(_OPEN)
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
            pieces.append(TextPiece(self._text.space + _OPEN + said))
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
            pieces.append(TextPiece(self._text.space + _OPEN + unit.raw))
        elif unit.is_over:
            self._is_open = False
        return behind if not self._is_open else None

    def finish(self) -> list[Piece]:
        """End the text; returns what was held back."""
        held = self._text.finish()
        if self._is_open:
            begun = self._unit is not None and self._unit.begun
            raw = self._head if self._unit is None else self._unit.raw
            held = "" if begun else self._text.space + _OPEN + raw
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

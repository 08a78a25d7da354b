"""Calls between tags, as Hermes and Qwen write them.

<tool_call>
{"name": "search", "arguments": {"query": "…"}}
</tool_call>
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from pcg.serve.openai.chat.tool_calls.held_text import HeldText
from pcg.serve.openai.chat.tool_calls.json_call import JsonCall
from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.pieces import Piece, TextPiece

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Hermes:
    """The format of Hermes and Qwen."""

    name: ClassVar[str] = "hermes"
    opening: ClassVar[str] = _OPEN
    markers: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
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
        return f'{_OPEN}\n{{"name": {quoted}, "arguments": {arguments}}}\n{_CLOSE}'

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
        self._text = HeldText(_OPEN)
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
        return self._text.space + _OPEN + self._raw

"""Calls as the whole output, as Llama 3 writes them.

    {"name": "search", "parameters": {"query": "…"}}

Several are separated by semicolons, and <|python_tag|> may stand before the first. JSON that calls
none of the tools is content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from pcg.serve.openai.chat.tool_calls.held_text import MOST_SPACE
from pcg.serve.openai.chat.tool_calls.json_call import JsonCall
from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.pieces import Piece, TextPiece

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

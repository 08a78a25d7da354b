"""One tool call as a JSON object, read while it is generated.

    {"name": "search", "arguments": {"query": "…"}}

The text of the arguments is handed on as the model writes it, once the name is known. It is not
parsed: an output that is cut off has the beginning of its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from pcg.serve.openai.chat.tool_calls.pieces import ArgumentsPiece, CallPiece, Piece

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

"""The tokens of the text IR, and the reader that a parser stands on.

A token is a `%value`, an `@label`, a string, a number, a word or a sign. Strings are in double
quotes, on one line, with the escapes that `pcg.ir.printer` writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from pcg.errors import ParseError
from pcg.ir.printer import ESCAPES, NAME

_STRING = r'"(?:[^"\\\n]|\\[^\n])*"'
_TOKEN = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)
    |(?P<value>%{NAME.pattern})
    |(?P<label>@(?:{NAME.pattern}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>\*\*|[(){{}}\[\],:=|+*/-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u\{([0-9a-fA-F]{1,6})\}|(.))")
_UNESCAPES = {escape[1]: character for character, escape in ESCAPES.items()}


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text, and where it starts."""

    kind: str
    text: str
    start: int


class TokenReader:
    """Reads a text token by token; what was not expected is shown in its line."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize()
        self._position = 0

    def _tokenize(self) -> list[Token]:
        tokens: list[Token] = []
        start = 0
        while start < len(self._text):
            match = _TOKEN.match(self._text, start)
            if match is None:
                if self._text[start : start + 2].lstrip("@").startswith('"'):
                    self._raise(start, "expected a closing '\"' on the same line")
                self._raise(
                    start, f"expected a token, found {self._text[start]!r}, which no IR has"
                )
            if match.lastgroup != "space":
                tokens.append(Token(str(match.lastgroup), match.group(), start))
            start = match.end()
        tokens.append(Token("end", "", len(self._text)))
        return tokens

    @property
    def token(self) -> Token:
        return self._tokens[self._position]

    @property
    def previous(self) -> Token:
        return self._tokens[self._position - 1]

    def fail(self, expected: str, token: Token | None = None) -> NoReturn:
        """Raise a ParseError at the token, the current one unless given."""
        token = token or self.token
        found = "the end of the text" if token.kind == "end" else repr(token.text)
        self._raise(token.start, f"expected {expected}, found {found}")

    def _raise(self, start: int, message: str) -> NoReturn:
        number = self._text.count("\n", 0, start) + 1
        begin = self._text.rfind("\n", 0, start) + 1
        line = self._text[begin:].split("\n", 1)[0]
        gutter = f"{number} | "
        indent = "".join(c if c == "\t" else " " for c in line[: start - begin])
        caret = f"{' ' * (len(gutter) - 2)}| {indent}^"
        where = f"line {number}, column {start - begin + 1}"
        raise ParseError(f"{where}: {message}\n{gutter}{line}\n{caret}")

    def advance(self) -> Token:
        token = self.token
        self._position += 1
        return token

    def next_is(self, *texts: str) -> bool:
        return self.token.kind in ("sign", "word") and self.token.text in texts

    def accept(self, text: str) -> bool:
        found = self.next_is(text)
        self._position += found
        return found

    def expect(self, *texts: str) -> str:
        if not self.next_is(*texts):
            *others, last = map(repr, texts)
            self.fail(f"{', '.join(others)} or {last}" if others else last)
        return self.advance().text

    def take(self, kind: str, expected: str) -> Token:
        if self.token.kind != kind:
            self.fail(expected)
        return self.advance()

    def unquote(self, text: str, start: int) -> str:
        """The string that a literal at this place of the text stands for."""

        def character(match: re.Match[str]) -> str:
            code, letter = match.groups()
            if code and int(code, 16) <= 0x10FFFF:
                return chr(int(code, 16))
            if letter not in _UNESCAPES:
                known = ", ".join(ESCAPES.values())
                self._raise(
                    start + 1 + match.start(), f"expected {known} or \\u{{hex}}, found {match[0]!r}"
                )
            return _UNESCAPES[letter]

        return _ESCAPE.sub(character, text[1:-1])

"""Line breaking of emitted Python to a readable width."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100

_OPERATORS = (("&", "|"), ("+", "-"), ("*", "/", "//", "%"))
"""Binary operators, in ascending precedence."""


def statement(text: str, indent: int = 4) -> str:
    """Return a statement on one line, or with its first parentheses' contents on further lines.

    Targets longer than a line also get parentheses.
    """
    space = " " * indent
    begin = text.find("(", text.find(" = ") + 1)
    if len(text) + indent <= WIDTH or begin < 0:
        return f"{space}{text}"
    depth, end = 1, begin + 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    inner = filled(_parts(text[begin + 1 : end - 1]), indent + 4)
    head = [f"{space}{text[: begin + 1]}"]
    targets, _, called = text[: begin + 1].partition(" = ")
    if len(head[0]) > WIDTH and called and len(names := _arguments(targets)) > 1:
        head = [f"{space}(", *filled(names, indent + 4), f"{space}) = {called}"]
    return "\n".join([*head, *inner, f"{space}{text[end - 1 :]}"])


def _parts(inner: str) -> list[str]:
    """Split into arguments, or else into operands at the operator of lowest precedence."""
    operands = _arguments(inner)
    words = inner.split(" ")
    for kind in _OPERATORS:
        if len(operands) > 1:
            return operands
        operands, depth = [], 0
        for word in words:
            if not depth and word in kind and operands:
                operands.append(word)
            elif operands:
                operands[-1] += f" {word}"
            else:
                operands.append(word)
            depth += sum({"(": 1, "[": 1, ")": -1, "]": -1}.get(mark, 0) for mark in word)
    return operands


def _arguments(inner: str) -> list[str]:
    parts, depth = [""], 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    words = [f"{part.strip()}," for part in parts]
    # A trailing comma stays, for example of a tuple of one.
    return words[:-1] if words[-1] == "," else [*words[:-1], words[-1].removesuffix(",")]


def wrapped(words: Sequence[str], opening: str, closing: str, indent: int = 4) -> list[str]:
    """Return `opening words closing` on one line if it fits, else the words filled over lines."""
    space = " " * indent
    line = f"{space}{opening}{' '.join(words)}{closing}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{space}{opening}", *filled(words, indent + 4), f"{space}{closing}"]


def filled(words: Sequence[str], indent: int = 4) -> list[str]:
    """Fill words into lines; break a word that is longer than a line like a statement."""
    space = " " * indent
    lines: list[str] = []
    for word in words:
        if len(word) + indent > WIDTH:
            lines += statement(word, indent).splitlines()
        elif lines and len(lines[-1]) + 1 + len(word) <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(space + word)
    return lines

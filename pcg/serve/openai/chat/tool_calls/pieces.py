"""Pieces of an assistant's message, as a parser finds them in generated text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


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

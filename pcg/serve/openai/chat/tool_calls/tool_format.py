"""Formats: how a family of models writes tool calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from pcg.serve.openai.chat.tool_calls.notation import Notation
from pcg.serve.openai.chat.tool_calls.pieces import ToolParser


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

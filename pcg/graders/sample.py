"""The sample that is graded, and the values that templates name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pcg.errors import GradingError


@dataclass(frozen=True)
class Sample:
    """The output of a model, with the row of data that it answers.

    Attributes:
        item: the row, whose columns templates name as `item.x`.
        output_tools: the tool calls of the output.
    """

    output_text: str
    item: Any = None
    output_tools: Sequence[Any] = ()

    @cached_property
    def output_json(self) -> Any:
        """The output, read as JSON. GradingError: it is none."""
        try:
            return json.loads(self.output_text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise GradingError("the output is not valid JSON", "sample_parse_error") from None

    def value(self, path: Sequence[str]) -> Any:
        """Return the value that a path names, by keys of objects and places in lists alone.

        Raises:
            GradingError: there is none, or the output that it is in is no JSON.
        """
        found: Any
        match path[0], path[1] if len(path) > 1 else "":
            case "item", _:
                found, rest = self.item, path[1:]
            case "sample", "output_text":
                found, rest = self.output_text, path[2:]
            case "sample", "output_json":
                found, rest = self.output_json, path[2:]
            case _:
                found, rest = list(self.output_tools), path[2:]
        for key in rest:
            found = _entry(found, key, ".".join(path))
        return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _entry(value: Any, key: str, path: str) -> Any:
    if isinstance(value, dict) and key in value:
        return value[key]
    if isinstance(value, list) and key.isdecimal() and len(key) < 10 and int(key) < len(value):
        return value[int(key)]
    raise GradingError(f"the template names {path[:256]}, and {key!r} is not there", _MISSING)


_MISSING = "invalid_variable_error"

"""The graded sample, and templates for its values.

A template is text with names such as `{{item.x}}` and `{{sample.output_text}}`. A name is a path of
keys and list indices, without expressions; inserted text is not searched for further names.
Strings are inserted unchanged, every other value as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pcg.errors import GradingError

MOST_TEXT = 2**16
"""Maximum number of characters of a grader's text."""
MOST_CHARACTERS = 2**18
"""Maximum number of characters of a filled template."""
MOST_NAMES = 256
"""Maximum number of names in a template."""
_NAME = re.compile(r"\{\{([^{}]{0,256})\}\}")
_STEP = re.compile(r"[\w-]+|\[\d+\]")
_OF_SAMPLE = ("output_text", "output_json", "output_tools")


@dataclass(frozen=True)
class Sample:
    """The output of a model, with the row of data that it answers.

    Attributes:
        item: the row; templates name its columns as `item.x`.
        output_tools: the tool calls of the output.
    """

    output_text: str
    item: Any = None
    output_tools: Sequence[Any] = ()

    @cached_property
    def output_json(self) -> Any:
        """The output, read as JSON. GradingError: it is not valid JSON."""
        try:
            return json.loads(self.output_text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise GradingError("the output is not valid JSON", "sample_parse_error") from None

    def value(self, path: Sequence[str]) -> Any:
        """Return the value at a path of keys of objects and places in lists.

        Raises:
            GradingError: the path does not exist, or the output is not valid JSON.
        """
        if path[0] == "item":
            value, keys = self.item, path[1:]
        else:
            value, keys = getattr(self, path[1]), path[2:]
        for key in keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and _is_place(key, value):
                value = value[int(key)]
            else:
                shown = ".".join(path)[:256]
                message = f"the template names {shown}, and {key!r} is not there"
                raise GradingError(message, "invalid_variable_error")
        return value


def _is_place(key: str, values: list[Any]) -> bool:
    return key.isdecimal() and len(key) < 10 and int(key) < len(values)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


class Template:
    """A parsed template: texts, and paths of names between them.

    Args:
        text: the template as JSON has it.
    Raises:
        ValueError: it is not a text, too long, or has an unknown name.
    """

    def __init__(self, text: object) -> None:
        if not isinstance(text, str):
            raise ValueError(f"a value of the type {type(text).__name__}; use a text")
        if len(text) > MOST_TEXT:
            raise ValueError(f"{len(text)} characters; use at most {MOST_TEXT}")
        pieces = _NAME.split(text)
        if len(pieces) // 2 > MOST_NAMES:
            raise ValueError(f"{len(pieces) // 2} names; use at most {MOST_NAMES}")
        parts = [_path(piece) if index % 2 else piece for index, piece in enumerate(pieces)]
        self._parts = tuple(part for part in parts if part)

    def fill(self, sample: Sample) -> str:
        """Return the text for a sample.

        Raises:
            GradingError: a name is not there, or the text would be too long.
        """
        texts, length = [], 0
        for part in self._parts:
            value = part if isinstance(part, str) else sample.value(part)
            texts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            length += len(texts[-1])
            if length > MOST_CHARACTERS:
                message = (
                    f"a template makes a text of more than {MOST_CHARACTERS} characters; use "
                    "shorter items, or fewer names"
                )
                raise GradingError(message, "other_error")
        text = "".join(texts)
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "a template makes a text with half a character"
            raise GradingError(message, "other_error") from None
        return text


def _path(name: str) -> tuple[str, ...]:
    path = tuple(step.strip("[]") for step in _STEP.findall(name))
    spelled = re.sub(r"\[(\d+)\]", r".\1", name.strip())
    is_known = (path[:1] == ("item",) and len(path) > 1) or (
        path[:1] == ("sample",) and path[1:2] and path[1] in _OF_SAMPLE
    )
    if not is_known or ".".join(path) != spelled:
        names = ", ".join(f"sample.{field}" for field in _OF_SAMPLE)
        raise ValueError(
            f"it names {{{{{name.strip()[:64]}}}}}; use item.COLUMN, {names}, and paths in them"
        )
    return path

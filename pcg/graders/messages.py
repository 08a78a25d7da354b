"""Messages of model graders: a chat with templates, for a judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pcg.errors import GraderError, GradingError
from pcg.graders.fields import MOST_TEXT, Fields
from pcg.graders.sample import Sample
from pcg.graders.template import Template

MOST_MESSAGES = 64
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text")
MOST_CHARACTERS = 2**20
"""The most characters of all messages, filled in."""


@dataclass(frozen=True)
class ModelMessage:
    """A message of a chat; the texts of its parts are joined."""

    role: str
    parts: tuple[Template, ...]


def read_messages(given: Fields) -> tuple[ModelMessage, ...]:
    """Return the messages of `input`. GraderError: they cannot be."""
    found = []
    for index, one in enumerate(given.items("input", MOST_MESSAGES)):
        where = f"{given.where}.input.{index}"
        message = Fields.of(one, where, ("role", "content", "type"))
        if "type" in message:
            message.one_of("type", ("message",))
        role = message.one_of("role", _ROLES)
        content = message.required("content")
        parts = content if isinstance(content, list) else [content]
        if not 0 < len(parts) <= MOST_MESSAGES:
            raise GraderError(f"{where}.content: use a list of 1 to {MOST_MESSAGES}")
        texts = (_text(part, f"{where}.content") for part in parts)
        found.append(ModelMessage(role, tuple(Template.of(text, where) for text in texts)))
    return tuple(found)


def fill_messages(messages: Sequence[ModelMessage], sample: Sample) -> list[dict[str, str]]:
    """Return the chat for a sample. GradingError: a name is not there, or it is too long."""
    made = []
    length = 0
    for message in messages:
        content = "".join(part.fill(sample) for part in message.parts)
        length += len(content)
        if length > MOST_CHARACTERS:
            raise GradingError(
                f"the judge's chat has more than {MOST_CHARACTERS} characters; use shorter items",
                "other_error",
            )
        made.append({"role": message.role, "content": content})
    return made


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        text: Any = part
    else:
        fields = Fields.of(part, where, _part_fields(part))
        kind = fields.text("type", 64)
        if kind not in _TEXTS:
            raise GraderError(f"{where} has a part of the type {kind!r}; judges read texts alone")
        text = fields.text("text")
    if len(text) > MOST_TEXT:
        raise GraderError(f"{where} has {len(text)} characters; use at most {MOST_TEXT}")
    return str(text)


def _part_fields(part: Any) -> tuple[str, ...]:
    """Return the fields that a part may have: those of images and audio are refused by type."""
    if isinstance(part, dict) and part.get("type") not in _TEXTS:
        return tuple(map(str, part))
    return ("type", "text")

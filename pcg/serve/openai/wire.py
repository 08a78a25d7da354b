"""Parts of bodies that several endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema, model_validator

MOST_PROMPTS = 4096
"""The most prompts of a request; each is one of the engine's."""


class WireModel(BaseModel):
    """A body, or a part of one: unknown fields are refused, and types are not converted.

    As in JSON schema, 2.0 is an integer.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: _whole(value) for name, value in data.items()}


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an int, and a list with such numbers as ints."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and any(type(one) in (float, list) for one in value):
        return [_whole(one) for one in value]
    return value


class StreamOptions(WireModel):
    """Options of a stream; `include_obfuscation` has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts that a body has, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("use a text, texts, token ids, or lists of token ids; not none of them")
    if _are_ids(value):
        return [value]
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"{len(value)} prompts; use at most {MOST_PROMPTS}")
    if not (all(isinstance(one, str) for one in value) or all(_are_ids(one) for one in value)):
        raise ValueError("use a text, texts, token ids, or lists of token ids")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": _TEXT,
            "minItems": 1,
            "maxItems": MOST_PROMPTS,
        },
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_PROMPTS},
    ]
}

Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
"""A text, texts, token ids or lists of them, as a list of prompts."""

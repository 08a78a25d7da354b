"""Parts of bodies that several endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

MOST_PROMPTS = 4096
"""The most prompts of a request; each is one of the engine's."""
MOST_FIELDS = 256
"""The most fields of an object that has some known ones."""
MOST_ENTRIES = 4096
"""The most entries of an object in it whose names are the client's, as `logit_bias`."""


def _end_lists_early(schema: Any) -> None:
    """Have the validation of lists end at their first error.

    Args:
        schema: a part of pydantic's schema, which is changed.
    """
    if isinstance(schema, list | tuple):
        for part in schema:
            _end_lists_early(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_lists_early(part)


class WireModel(BaseModel):
    """A body, or a part of one: unknown fields are refused, and types are not converted.

    As in JSON schema, 2.0 is an integer. A list ends at its first wrong entry, and objects have a
    bound of their fields: an error for each of millions would take seconds, and memory.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_lists_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_FIELDS:
            raise ValueError(f"an object has {len(data)} fields; use at most {MOST_FIELDS}")
        for name, value in data.items():
            if type(value) is dict and len(value) > MOST_ENTRIES:
                raise ValueError(f"{name} has {len(value)} entries; use at most {MOST_ENTRIES}")
        return {name: _whole(value, 2) for name, value in data.items()}


def _whole(value: Any, depth: int) -> Any:
    """Return a number without a fraction as an int, and lists with such numbers as ints.

    Args:
        depth: how many lists in each other are looked into; no field has more than two.
    """
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if depth and type(value) is list and not _kinds(value).isdisjoint((float, list)):
        return [_whole(one, depth - 1) for one in value]
    return value


def _kinds(values: list[Any]) -> set[type]:
    """Return the types of a list's entries, of which there may be millions."""
    return set(map(type, values))


RequestName = Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")]
"""A client's id of a request, which replies have and others log: visible ASCII."""


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
    if _kinds(value) != {str} and not all(map(_are_ids, value)):
        raise ValueError("use a text, texts, token ids, or lists of token ids")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and _kinds(value) == {int}


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

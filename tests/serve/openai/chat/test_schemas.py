"""Schemas without notes: what they allow stays, whatever properties are called."""

from __future__ import annotations

import jsonschema
import pytest

from pcg.serve.http.errors import ApiError
from pcg.serve.openai.sampling import bare

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Book",
    "description": "A book.",
    "type": "object",
    "properties": {
        "title": {"type": "string", "title": "Title", "default": "none"},
        "description": {"$ref": "#/$defs/description"},
        "kind": {"enum": [{"title": "a"}, "b"], "examples": ["b"]},
        "notes": {"type": "array", "items": {"anyOf": [{"const": {"default": 1}, "title": "x"}]}},
    },
    "required": ["title", "kind"],
    "$defs": {"description": {"type": "integer", "$comment": "of pages"}},
}


def test_notes_are_left_out() -> None:
    assert bare(SCHEMA, "tools") == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "description": {"$ref": "#/$defs/description"},
            "kind": {"enum": [{"title": "a"}, "b"]},
            "notes": {"type": "array", "items": {"anyOf": [{"const": {"default": 1}}]}},
        },
        "required": ["title", "kind"],
        "$defs": {"description": {"type": "integer"}},
    }


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ({"title": "a", "kind": {"title": "a"}, "notes": [{"default": 1}]}, True),
        ({"title": "a", "kind": {}}, False),
        ({"title": 3, "kind": "b"}, False),
        ({"title": "a", "kind": "b", "description": 7}, True),
        ({"title": "a", "kind": "b", "description": "c"}, False),
        ({"kind": "b"}, False),
    ],
)
def test_it_allows_the_same(value: object, is_valid: bool) -> None:
    for schema in (SCHEMA, bare(SCHEMA, "tools")):
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == is_valid


def test_what_is_no_schema_stays() -> None:
    for schema in (True, 3, "a", None, [], {"properties": 5}, {"enum": 3}):
        assert bare(schema, "tools") == schema


def test_nesting_has_an_end() -> None:
    deep: object = {}
    for _ in range(20_000):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        bare(deep, "tools")

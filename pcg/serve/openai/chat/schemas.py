"""JSON schemas as guides: without what says nothing of an output, so that more of them fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcg.serve.errors import ApiError

_NOTES = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly", "x-guidance"}
)
_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties"}) | {
    "properties"
}
"""Keywords whose value has a schema under each name."""
_VALUES = frozenset({"const", "enum"})


def bare(schema: Any, param: str) -> Any:
    """Return a schema without descriptions and the like; what is no schema stays as it is.

    ApiError: it is nested too deeply.
    """
    try:
        return _bare(schema)
    except RecursionError as error:
        raise ApiError(400, "The schema is nested too deeply.", param=param) from error


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _bare_value(key, value) for key, value in schema.items() if key not in _NOTES}


def _bare_value(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _OF_SCHEMAS and isinstance(value, Mapping):
        return {name: _bare(one) for name, one in value.items()}
    return _bare(value)

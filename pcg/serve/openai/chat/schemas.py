"""JSON schemas as bodies have them, on their way to guides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pcg.runtime.guided.guide import each_schema
from pcg.serve.errors import ApiError

_NOTES = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly"}
)
_NAMING = ("patternProperties", "properties")
"""Keywords that name the properties of an object."""


def bare(schema: Any, param: str) -> Any:
    """Return a schema without descriptions and the like, so that longer ones fit a guide.

    ApiError: it is nested too deeply.
    """
    return _each(schema, _without_notes, param)


def closed(schema: Any, param: str) -> Any:
    """Return a schema whose objects have no properties but those that they name.

    ApiError: it is nested too deeply.
    """
    return _each(schema, _without_additions, param)


def _each(schema: Any, act: Callable[[dict[str, Any]], Any], param: str) -> Any:
    try:
        return each_schema(schema, act)
    except RecursionError as error:
        raise ApiError(400, "The schema is nested too deeply.", param=param) from error


def _without_notes(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _NOTES}


def _without_additions(schema: dict[str, Any]) -> dict[str, Any]:
    names_some = any(isinstance(schema.get(key), Mapping) for key in _NAMING)
    return {"additionalProperties": False, **schema} if names_some else schema

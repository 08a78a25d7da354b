"""Values of a configuration file, converted to the types of the fields that they are for.

YAML knows numbers, texts, lists and objects. A number may come as a text, as YAML 1.1 reads `1e-3`,
a list for one of its elements alone, and a path is relative to a folder.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pcg.files import expanded
from pcg.units import shown


def converted(given: Any, hint: Any, folder: Path) -> Any:
    """Return a value as a field of a type has it.

    Args:
        given: what YAML has read.
        hint: the field's type.
        folder: where relative paths begin.
    Raises:
        ValueError: it is no such value; the text says what would be one.
    """
    kinds = _members(hint)
    if Any in kinds or object in kinds or (given is None and type(None) in kinds):
        return given
    for kind in kinds:
        found = _one(given, kind, folder)
        if found is not None:
            return found
    wanted = " or ".join(dict.fromkeys(_words(kind) for kind in kinds))
    raise ValueError(f"{shown(given)}; use {wanted}")


def _members(hint: Any) -> list[Any]:
    """The types of a union, or the one type; narrow ones before wide ones."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    return sorted(get_args(hint) if is_union else [hint], key=lambda kind: kind is str)


def _one(given: Any, kind: Any, folder: Path) -> Any:
    """Return a value as one type has it; None if it is no such value."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return given if any(given == word and type(given) is type(word) for word in inner) else None
    if kind is bool:
        return given if isinstance(given, bool) else None
    if kind in (int, float):
        return _number(given, kind)
    if kind is str:
        return given if isinstance(given, str) else None
    if isinstance(origin, type) and issubclass(origin, os.PathLike):
        return folder / expanded(given) if isinstance(given, str) and given else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(given, inner, folder)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _sequence(given, origin, inner, folder)
    return None


def _number(given: Any, kind: type) -> Any:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        number = kind(given)
    except (OverflowError, ValueError):
        return None
    is_same = isinstance(given, str) or number == given or math.isnan(number)
    return number if is_same else None


def _mapping(given: Any, inner: Sequence[Any], folder: Path) -> Any:
    if not isinstance(given, Mapping):
        return None
    values = inner[1] if inner else Any
    return {str(name): converted(value, values, folder) for name, value in given.items()}


def _sequence(given: Any, origin: type, inner: Sequence[Any], folder: Path) -> Any:
    is_fixed = issubclass(origin, tuple) and ... not in inner
    if not isinstance(given, list):
        given = None if is_fixed or given is None else [given]
    if given is None or (is_fixed and len(given) != len(inner)):
        return None
    kinds = inner if is_fixed else [inner[0]] * len(given)
    return tuple(converted(one, kind, folder) for one, kind in zip(given, kinds, strict=True))


def _words(kind: Any) -> str:
    """The words for a value of a type."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, inner))
    named = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if origin in named:
        return named[origin]
    if kind is type(None):
        return "null"
    if isinstance(origin, type) and issubclass(origin, os.PathLike):
        return "a path"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object"
    is_fixed = isinstance(origin, type) and issubclass(origin, tuple) and ... not in inner
    return f"a list of {len(inner)} values" if is_fixed else "a list"

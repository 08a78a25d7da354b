"""Types of fields as options: what typer reads, and how a field's value is made of it."""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pcg.files import expanded


@dataclass(frozen=True)
class Kind:
    """The way in which an option of a type is given.

    Attributes:
        given: the type that typer reads: texts, or the bool of a flag.
        metavar: the value's name in help; None for a flag.
        is_flag: it has no value.
    """

    given: Any
    metavar: str | None
    is_flag: bool = False


def kind_of(hint: Any) -> Kind:
    """The way in which an option is given: once, repeatedly, as several values, or as a flag."""
    kinds = _members(hint)
    plain = [kind for kind in kinds if get_origin(kind) is not Literal]
    if plain == [bool]:  # also with words for what it is by default
        return Kind(bool, None, True)
    if len(kinds) == 1:
        inner = get_args(kinds[0])
        if _is_mapping(kinds[0]):
            return Kind(list[str], f"NAME={_metavar(_members(inner[1]))}")
        if _is_fixed(kinds[0]):
            texts: Any = tuple.__class_getitem__((str,) * len(inner))
            return Kind(texts, " ".join(_metavar([each]) for each in inner))
        if _is_sequence(kinds[0]):
            return Kind(list[str], _metavar([inner[0]]))
    return Kind(str, _metavar(kinds))


def convert(given: Any, hint: Any) -> Any:
    """A field's value from what typer has read. ValueError: it is none, and what would be one."""
    kinds = _members(hint)
    if isinstance(given, bool):
        return given
    if isinstance(given, str):
        return _parsed(given, hint)
    inner = get_args(kinds[0])
    if _is_mapping(kinds[0]):
        return _mapping(given, inner[1])
    if _is_fixed(kinds[0]):
        return tuple(_parsed(text, each) for text, each in zip(given, inner, strict=True))
    texts = [part for text in given for part in (text.split(",") if inner[0] is int else [text])]
    return tuple(_parsed(text, inner[0]) for text in texts)


def _members(hint: Any) -> list[Any]:
    """The types of a union, or the one type; without None."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    return [kind for kind in (get_args(hint) if is_union else (hint,)) if kind is not type(None)]


def _choices(kinds: list[Any]) -> list[str]:
    return [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_sequence(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _is_fixed(kind: Any) -> bool:
    """True for a tuple of a number of values."""
    return get_origin(kind) is tuple and ... not in get_args(kind)


def _is_path(kind: Any) -> bool:
    return kind is Path or kind is os.PathLike or get_origin(kind) is os.PathLike


def _metavar(kinds: list[Any]) -> str:
    choices = _choices(kinds)
    if choices:
        return "|".join(choices)
    if any(map(_is_path, kinds)):
        return "PATH"
    if any(map(_is_sequence, kinds)):
        return "NAME,…"
    names = {int: "N", float: "X", str: "TEXT", bool: "true|false"}
    return "|".join(name for kind, name in names.items() if kind in kinds) or "VALUE"


def _parsed(text: str, hint: Any) -> Any:
    """The value that a text is."""
    kinds = _members(hint)
    choices = _choices(kinds)
    if text in choices:
        return text
    if text.lower() == "none" and (hint is Any or type(None) in get_args(hint)):
        return None
    if hint is Any:
        return _json(text)
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                continue
    if any(map(_is_sequence, kinds)):
        return _names(text) if str in kinds else tuple(text.split(","))
    if str in kinds or any(kind is os.PathLike for kind in kinds):
        return text
    if Path in kinds:
        return expanded(text)
    if choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}")
    numbers = {int: "a whole number", float: "a number", bool: "true or false"}
    wanted = " or ".join(numbers[kind] for kind in kinds if kind in numbers)
    raise ValueError(f"{text!r}; use {wanted}")


def _names(text: str) -> str | tuple[str, ...]:
    """Modules: names, separated by commas; or a word for many, such as all-linear, or a regex."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("it names no module")
    is_word = text.lower() == "all-linear" or not all(re.fullmatch(r"[\w.]+", n) for n in names)
    return text if is_word else names


def _mapping(texts: Sequence[str], hint: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if hint is float:  # whose values have no commas
        texts = [part.strip() for text in texts for part in text.split(",")]
    for each in texts:
        name, equals, text = each.partition("=")
        if not (name and equals and text):
            raise ValueError(f"{each!r}; use NAME={_metavar(_members(hint))}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = _parsed(text, hint)
    return values


def _json(text: str) -> Any:
    """JSON, or else a word."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text

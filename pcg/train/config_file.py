"""A configuration file: YAML whose keys are the fields of a few dataclasses.

A key that is none of these is refused with the closest one, and so is one that stands there twice.
Settings `key=value` take the place of what the file has; `peft.r=4` sets a part of an object.

Values of a configuration file, converted to the types of the fields that they are for.

YAML knows numbers, texts, lists and objects. A number may come as a text, as YAML 1.1 reads `1e-3`,
a list for one of its elements alone, and a path is relative to a folder.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from pcg.errors import FinetuneError, PcgError
from pcg.files import expanded, read_text, shown_path
from pcg.keywords import check_names
from pcg.units import shown

# ------------------------------------------------------------------------------------ config values


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


# -------------------------------------------------------------------------------------- config file


T = TypeVar("T")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration as it was read, with its settings.

    Attributes:
        path: the file.
        values: the value of each key that was given, of its field's type.
    """

    path: Path
    values: Mapping[str, Any]

    def make(self, kind: type[T], **others: object) -> T:
        """Return a dataclass of the keys that are its fields.

        Args:
            others: fields for which the configuration has no value.
        Raises:
            FinetuneError: a field without a default is missing.
            PcgError: as of the dataclass; a value is out of its range.
        """
        given = {**others, **self.given(kind)}
        missing = [
            field.name
            for field in dataclasses.fields(kind)  # type: ignore[arg-type]
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in given
        ]
        if missing:
            raise FinetuneError(f"{shown_path(self.path)} has no {missing[0]!r}; give it a value")
        return kind(**given)

    def given(self, kind: type, *without: str) -> dict[str, Any]:
        """Return the values that are fields of a dataclass."""
        names = {field.name for field in dataclasses.fields(kind)} - set(without)
        return {name: value for name, value in self.values.items() if name in names}


def read_config(path: Path, kinds: Sequence[type], settings: Sequence[str] = ()) -> ConfigFile:
    """Read a configuration.

    Args:
        path: the YAML file. Its paths are relative to its folder.
        kinds: the dataclasses whose fields are its keys. Where two have a field of one name, it is
            one key.
        settings: `key=value` each, the value in YAML; their paths are relative to the working
            directory.
    Raises:
        FinetuneError: the file cannot be read, a key is unknown, or a value is of another type.
    """
    hints: dict[str, Any] = {}
    for kind in reversed(kinds):
        own = get_type_hints(kind)
        hints |= {field.name: own[field.name] for field in dataclasses.fields(kind)}
    where = shown_path(path)
    read = _parsed(read_text(path, FinetuneError), where)
    if not isinstance(read, Mapping):
        raise FinetuneError(f"{where} has to be an object: a key and its value on each line")
    values = _checked(read, hints, path.parent, where)
    for setting in settings:
        _set(values, setting, hints)
    return ConfigFile(path, values)


def _checked(
    read: Mapping[Any, Any], hints: Mapping[str, Any], folder: Path, where: str
) -> dict[str, Any]:
    """Return values of their fields' types."""
    try:
        check_names(map(str, read), hints, FinetuneError)
    except PcgError as error:
        raise FinetuneError(f"{where}: {error}") from error
    found = {}
    for name, value in read.items():
        try:
            found[str(name)] = converted(value, hints[str(name)], folder)
        except ValueError as error:
            raise FinetuneError(f"{where}: {name}={error}") from error
    return found


def _set(values: dict[str, Any], setting: str, hints: Mapping[str, Any]) -> None:
    """Take a setting `key=value` or `key.part=value` over."""
    name, equals, text = setting.partition("=")
    key, *parts = name.strip().split(".")
    if not equals or not all((key, *parts)):
        raise FinetuneError(f"--set {setting}; use key=value, such as learning_rate=1e-4")
    value = _parsed(text, f"--set {setting}")
    for part in reversed(parts):
        value = {part: value}
    made = _checked({key: value}, hints, Path(), f"--set {setting}")
    values[key] = _merged(values.get(key), made[key]) if parts else made[key]


def _merged(old: Any, new: Any) -> Any:
    """Return an object with what another one has in place of its own."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """YAML of plain values, in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The object of a node. ConstructorError: a key is there twice, or is no plain value."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise FinetuneError(f"{where}{line} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FinetuneError(f"{where} is not YAML: {error}") from error

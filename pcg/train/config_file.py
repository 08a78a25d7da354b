"""Configuration files: YAML with the fields of dataclasses as keys; the model and output options.

An unknown key is refused with the closest known key as a hint; a repeated key is refused, too.
Settings `key=value` override the file's values; `peft.r=4` sets a part of an object.

Values are numbers, text, lists and objects. A number may be written as text, as YAML 1.1 reads
`1e-3` as text; a list may be written as a single element; a path is relative to a folder. Data may
be a hub id.

Each configuration names a model (`ModelOptions`), and an adapter with its output folder
(`OutputOptions`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from pcg import compiler
from pcg.errors import AdapterError, FinetuneError, PcgError, UnsupportedError
from pcg.files import (
    check_writable,
    expanded,
    is_directory,
    is_there,
    read_text,
    shown_path,
)
from pcg.ir.program.manifest import is_program_folder
from pcg.keywords import check_names
from pcg.options import CompileOptions
from pcg.peft.adapter_files import has_adapter
from pcg.peft.registry import SHORTHANDS, recipe_of_fields
from pcg.runtime.data.files import is_dataset
from pcg.runtime.data.sources import named_sources
from pcg.runtime.executor import Executor
from pcg.source import resolve
from pcg.units import shown

# ------------------------------------------------------------------------------------ config values


DataPath = NewType("DataPath", Path)
"""A path of data, or its hub id."""


def converted(value: Any, hint: Any, folder: Path) -> Any:
    """Convert a value to the type of a field.

    Raises:
        ValueError: the value does not fit; the message describes allowed values.
    """
    kinds = _members(hint)
    if Any in kinds or object in kinds or (value is None and type(None) in kinds):
        return value
    if str in kinds and isinstance(value, str) and "{" in value:
        return value  # the text of a chat template instead of its path
    for kind in kinds:
        value_found = _one(value, kind, folder)
        if value_found is not None:
            return value_found
    wanted = " or ".join(dict.fromkeys(_words(kind) for kind in kinds))
    raise ValueError(f"{shown(value)}; use {wanted}")


def _members(hint: Any) -> list[Any]:
    """Return the types of a union, with `str` last."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    return sorted(get_args(hint) if is_union else [hint], key=lambda kind: kind is str)


def _one(value: Any, kind: Any, folder: Path) -> Any:
    """Convert a value to a type; None if the value does not fit."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return value if any(value == word and type(value) is type(word) for word in inner) else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind in (int, float):
        return _number(value, kind)
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is DataPath or (isinstance(origin, type) and issubclass(origin, os.PathLike)):
        if not isinstance(value, str) or not value:
            return None
        path = Path(os.path.normpath(folder / expanded(value)))
        is_hub_id = kind is DataPath and not is_there(path) and is_dataset(Path(value))
        return Path(value) if is_hub_id else path
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(value, inner, folder)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _sequence(value, origin, inner, folder)
    return None


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = kind(value)
    except (OverflowError, ValueError):
        return None
    is_same = isinstance(value, str) or number == value or math.isnan(number)
    return number if is_same else None


def _mapping(item: Any, inner: Sequence[Any], folder: Path) -> Any:
    if not isinstance(item, Mapping):
        return None
    values = inner[1] if inner else Any
    return {str(name): converted(value, values, folder) for name, value in item.items()}


def _sequence(value: Any, origin: type, inner: Sequence[Any], folder: Path) -> Any:
    is_fixed = issubclass(origin, tuple) and ... not in inner
    if not isinstance(value, list):
        value = None if is_fixed or value is None else [value]
    if value is None or (is_fixed and len(value) != len(inner)):
        return None
    kinds = inner if is_fixed else [inner[0]] * len(value)
    return tuple(converted(value, kind, folder) for value, kind in zip(value, kinds, strict=True))


def _words(kind: Any) -> str:
    """Describe the values of a type."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, inner))
    named = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if origin in named:
        return named[origin]
    if kind is type(None):
        return "null"
    if kind is DataPath or (isinstance(origin, type) and issubclass(origin, os.PathLike)):
        return "a path"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object"
    is_fixed = isinstance(origin, type) and issubclass(origin, tuple) and ... not in inner
    return f"a list of {len(inner)} values" if is_fixed else "a list"


T = TypeVar("T")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file with its settings.

    Attributes:
        values: the given values by key, converted to the types of the fields.
    """

    path: Path
    values: Mapping[str, Any]

    def make(self, kind: type[T], **others: object) -> T:
        """Return a dataclass with the values of its fields.

        Raises:
            FinetuneError: a field without a default is missing.
            PcgError: a value is out of range.
        """
        values_given = {**others, **self.given(kind)}
        missing = [
            field.name
            for field in dataclasses.fields(kind)  # type: ignore[arg-type]
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in values_given
        ]
        if missing:
            raise FinetuneError(f"{shown_path(self.path)} has no {missing[0]!r}; give it a value")
        return kind(**values_given)

    def given(self, kind: type, *without: str) -> dict[str, Any]:
        """Return the values for the fields of a dataclass."""
        names = {field.name for field in dataclasses.fields(kind)} - set(without)
        return {name: value for name, value in self.values.items() if name in names}

    def near(self, name: str) -> str:
        """Return the path of a name in the configuration's folder; else the name itself."""
        path = self.path.parent / expanded(name)
        return os.path.normpath(path) if is_there(path) else name


def read_config(path: Path, kinds: Sequence[type], settings: Sequence[str] = ()) -> ConfigFile:
    """Read a configuration.

    Args:
        path: the YAML file. Paths in the file are relative to its folder.
        kinds: the dataclasses with the keys as fields. Fields of the same name in two dataclasses
            share a key.
        settings: texts `key=value`, with values in YAML; paths in settings are relative to the
            working directory.
    Raises:
        FinetuneError: the file cannot be read, a key is unknown, or a value has a wrong type.
    """
    hints: dict[str, Any] = {}
    for kind in reversed(kinds):
        hints_of_kind = get_type_hints(kind)
        hints |= {field.name: hints_of_kind[field.name] for field in dataclasses.fields(kind)}
    where = shown_path(path)
    read = parse_yaml(read_text(path, FinetuneError), where)
    if not isinstance(read, Mapping):
        raise FinetuneError(f"{where} has to be an object: a key and its value on each line")
    values = _checked(read, hints, path.parent, where)
    for setting in settings:
        _set(values, setting, hints)
    return ConfigFile(path, values)


def _checked(
    read: Mapping[Any, Any], hints: Mapping[str, Any], folder: Path, where: str
) -> dict[str, Any]:
    """Return values converted to the types of their fields."""
    try:
        check_names(map(str, read), hints, FinetuneError)
    except PcgError as error:
        raise FinetuneError(f"{where}: {error}") from error
    values = {}
    for name, value in read.items():
        if name == "eval_data" and isinstance(value, str):
            value = named_sources(value) or value
        try:
            values[str(name)] = converted(value, hints[str(name)], folder)
        except ValueError as error:
            raise FinetuneError(f"{where}: {name}={error}") from error
    return values


def _set(values: dict[str, Any], setting: str, hints: Mapping[str, Any]) -> None:
    """Apply a setting `key=value` or `key.part=value`."""
    name, equals, text = setting.partition("=")
    key, *parts = name.strip().split(".")
    if not equals or not all((key, *parts)):
        raise FinetuneError(f"--set {setting}; use key=value, such as learning_rate=1e-4")
    value = parse_yaml(text, f"--set {setting}")
    for part in reversed(parts):
        value = {part: value}
    checked_values = _checked({key: value}, hints, Path(), f"--set {setting}")
    values[key] = _merged(values.get(key), checked_values[key]) if parts else checked_values[key]


def _merged(old: Any, new: Any) -> Any:
    """Merge two objects; the second wins."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """YAML of plain values with unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the object of a node. ConstructorError: a key is repeated or not plain."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text. FinetuneError: it is no YAML, or repeats a key."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise FinetuneError(f"{where}{line} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FinetuneError(f"{where} is not YAML: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The frozen base model.

    Attributes:
        model: a directory with a config.json, a hub id, a model that ships with pcg, or the folder
            of a compiled program.
        device: the device, by torch's name; by default a GPU if available, else the CPU.
        weights: the new place of a compiled program's weights, if they were moved.
        trust_edits: run a program with edited source.
    """

    title: ClassVar[str] = "Model"

    model: str
    device: str | None = None
    weights: str | None = None
    trust_edits: bool = False


def open_model(config: ConfigFile) -> Executor:
    """Return an executor of a configuration's model, without adapters.

    Raises:
        PcgError: the model, its weights or an option cannot be used.
    """
    place = config.make(ModelOptions)
    compiling = config.given(CompileOptions, "gradient_accumulation_steps")
    if compiling.pop("tp", 1) != 1:
        raise UnsupportedError(
            f"tp={config.values['tp']}; training by a file runs on one rank. pcg finetune --tp "
            "finetunes over several"
        )
    model = config.near(place.model)
    if is_program_folder(model):
        if compiling:
            raise FinetuneError(f"a program's {next(iter(compiling))} is chosen by pcg compile")
        weights = None if place.weights is None else config.near(place.weights)
        return compiler.load(model, weights, place.device, trust_edits=place.trust_edits)
    for name in ("weights", "trust_edits"):
        if getattr(place, name):
            raise FinetuneError(f"{name} is for compiled programs, and {model} is none")
    resolve(model, weights=True)  # fails fast for a wrong name
    return compiler.compile(model, None, device=place.device, **compiling)


CHECKPOINTS = "pcg-checkpoints"
"""The output's folder of checkpoints, which is removed when the adapter is saved."""
RECORD = "record"
"""The output's folder with the record of the run."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The adapter to train.

    Attributes:
        adapter: the adapter's name.
        output: the directory for the adapter and the run's record, and for checkpoints until the
            adapter is saved.
        peft: the recipe of a new adapter: lora or another method's name, or an object with the
            fields of peft's adapter_config.json; by default the program's recipe, else lora.
        start_from: a saved adapter, or its hub id, to train further, instead of a new adapter.
        overwrite: replace an adapter saved in the output.
        keep_checkpoints: keep the checkpoints of a finished run, so that resume: true with more
            epochs or steps extends it.
    """

    title: ClassVar[str] = "Adapter"

    adapter: str = "default"
    output: Path
    peft: str | Mapping[str, Any] | None = None
    start_from: str | None = None
    overwrite: bool = False
    keep_checkpoints: bool = False

    @classmethod
    def of(cls, config: ConfigFile) -> OutputOptions:
        """Return the options of a configuration. FinetuneError: it has no output."""
        files = config.make(cls)
        if files.start_from is None:
            return files
        return dataclasses.replace(files, start_from=config.near(files.start_from))

    def check(self, *, resumes: bool) -> None:
        """Refuse an output that cannot be written, or contains a saved adapter.

        Args:
            resumes: True if the run requires a checkpoint, and may replace the adapter of its job.
        Raises:
            AdapterError: names the output and the fix.
            FinetuneError: two options exclude each other.
        """
        output = self.output
        if is_there(output) and not is_directory(output):
            raise AdapterError(f"output {output} is a file; give a directory")
        if has_adapter(output) and not (self.overwrite or resumes):
            raise AdapterError(
                f"output {output} has a saved adapter; give another directory, overwrite: true to "
                "replace it, or resume: true to resume from a checkpoint. "
                f"start_from: {output} trains it further"
            )
        check_writable(output, f"adapter {self.adapter!r}", AdapterError)
        if self.start_from is not None and self.peft is not None:
            raise FinetuneError("start_from is a saved adapter with a recipe; leave peft out")

    def save(self, executor: Executor, checkpoint_dir: object) -> None:
        """Save the adapter; remove checkpoints from the output unless they are kept."""
        executor.save_adapter(self.adapter, self.output, overwrite=True)
        is_own = checkpoint_dir == self.output / CHECKPOINTS and not self.keep_checkpoints
        if not executor.ranks.rank and is_own:
            shutil.rmtree(self.output / CHECKPOINTS, ignore_errors=True)

    def configuration(self, executor: Executor) -> Any:
        """Return the recipe or the saved adapter to start from, for `add_adapter`.

        Raises:
            UnsupportedError: `peft` names no method.
        """
        if self.start_from is not None:
            return self.start_from
        if self.peft is None:
            return own_recipe(executor, self.adapter)
        if isinstance(self.peft, str) and self.peft.lower() not in SHORTHANDS:
            raise UnsupportedError(
                f"peft={self.peft!r}; use one of {', '.join(SHORTHANDS)}, or an object with "
                "peft_type and the method's fields"
            )
        return self.peft


def own_recipe(executor: Executor, name: str) -> Any:
    """Return the program's only recipe, for an adapter without its own; None if not unique."""
    recipes = executor.program.recipes
    if name not in recipes and len(recipes) == 1:
        return recipe_of_fields(next(iter(recipes.values())))
    return None

"""Command-line options from the fields of dataclasses.

A command's function takes dataclasses, for example `options: ExplainOptions`. Each field becomes an
option with the field's name, type and default. The option's help is the field's entry in the class
docstring; the class attribute `title` is the option's heading in help. Most of these dataclasses
belong to the library, so that each option is named, documented and checked in a single place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from pcg.errors import UnsupportedError
from pcg.files import expanded, read_text
from pcg.keywords import check_names, field_docs


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model that ships with pcg, for shells."""
    from pcg.source import shipped

    return [name for name in shipped() if name.lower().startswith(incomplete.lower())]


Model = Annotated[
    str,
    typer.Argument(
        help="Directory with a config.json, hub id, or a model of [cyan]pcg models[/].",
        autocompletion=complete_model,
        show_default=False,
        metavar="MODEL",
    ),
]
Runnable = Annotated[
    str,
    typer.Argument(
        help="Compiled program, a directory or hub id of a model with weights, or a base executor "
        "as split://HOST:PORT.",
        autocompletion=complete_model,
        show_default=False,
        metavar="DIR_OR_MODEL",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print a single JSON object and nothing else.")]


# -------------------------------------------------------------------------------------------- types


@dataclass(frozen=True)
class Kind:
    """The command-line form of a type.

    Attributes:
        reads: the type that typer reads: text, or bool for a flag.
        metavar: the value's name in help; None for a flag.
        is_flag: True for an option without a value.
    """

    reads: Any
    metavar: str | None
    is_flag: bool = False


def kind_of(hint: Any) -> Kind:
    """Return a type's command-line form: single value, repeated, several values, or flag."""
    kinds = _members(hint)
    plain = [kind for kind in kinds if get_origin(kind) is not Literal]
    if plain == [bool]:  # also for a union of bool and words, whose default is a word
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


def convert(value: Any, hint: Any) -> Any:
    """Convert a value that typer has read to a field's type.

    Raises:
        ValueError: the value does not fit; the message names values that do.
    """
    kinds = _members(hint)
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _parsed(value, hint)
    inner = get_args(kinds[0])
    if _is_mapping(kinds[0]):
        return _mapping(value, inner[1])
    if _is_fixed(kinds[0]):
        return tuple(_parsed(text, each) for text, each in zip(value, inner, strict=True))
    texts = [
        part for text in value for part in (text.split(",") if inner[0] in (int, float) else [text])
    ]
    return tuple(_parsed(text, inner[0]) for text in texts)


def _members(hint: Any) -> list[Any]:
    """Return a union's types, or the single type, without None."""
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
    """Parse module names separated by commas; a word such as all-linear, or a regex, stays text."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("it names no module")
    is_word = text.lower() == "all-linear" or not all(re.fullmatch(r"[\w.]+", n) for n in names)
    return text if is_word else names


def _mapping(texts: Sequence[str], hint: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if hint is float or hint is str:  # neither numbers nor names of columns contain commas
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
    """Parse JSON; other text stays as it is."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


FLAGS: Mapping[str, tuple[str, ...]] = {
    "dtypes": ("--dtype",),
    "find_region": ("--formula",),
    "gpus": ("--gpu", "--gpus"),
    "learning_rate": ("--learning-rate", "--lr"),
    "max_new_tokens": ("--max-new-tokens", "-n"),
    "optimizer_options": ("--optimizer-option",),
    "output": ("--output", "-o"),
    "prompt": ("--prompt", "-p"),
    "target_modules": ("--target-modules", "--targets"),
}
"""Options with a name that differs from their field's, or with several names."""

T = TypeVar("T")
Collect = Callable[[Mapping[str, Any]], Any]
"""Function that builds a command's argument from the options' values."""


def flags_of(name: str) -> tuple[str, ...]:
    """Return a field's option names, as typed on the command line."""
    return FLAGS.get(name, (f"--{name.replace('_', '-')}",))


@dataclass(frozen=True)
class Option:
    """A command-line option.

    Attributes:
        name: the field's name.
        hint: the field's type.
        help: the text of the option in help.
        default: the default in help; MISSING for a required option.
        title: the option's heading in help; None for the general heading.
    """

    name: str
    hint: Any
    help: str
    default: Any = None
    title: str | None = None

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as a parameter for typer; the parameter's default is None."""
        kind, flags = kind_of(self.hint), flags_of(self.name)
        is_required, help = self.default is dataclasses.MISSING, self.help
        if kind.is_flag and self.default is not False:
            flags = (*flags[:-1], f"{flags[-1]}/--no-{flags[-1].removeprefix('--')}")
        elif not is_required and self.default not in (None, False, (), ""):
            help = rf"{help} [dim]\[default: {_shown(self.default)}][/dim]"
        info = typer.Option(
            *flags,
            help=help,
            metavar=kind.metavar,
            show_default=False,
            rich_help_panel=self.title,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required else None,
            annotation=Annotated[kind.reads if is_required else kind.reads | None, info],
        )

    def value(self, value: Any) -> Any:
        """Convert a command-line value; raise BadParameter if it does not fit the field's type."""
        try:
            return convert(value, self.hint)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=flags_of(self.name)[0]) from error


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


@dataclass(frozen=True)
class Given(Generic[T]):
    """The fields of a dataclass that the command line sets."""

    type: type[T]
    values: Mapping[str, Any]

    def make(self, **others: object) -> T:
        """Build the dataclass; `others` fill fields that the command line does not set."""
        return self.type(**{**others, **self.values})


@dataclass(frozen=True)
class Only:
    """The subset of a dataclass's fields that become a command's options; used in `Annotated`."""

    names: Collection[str]


class OptionGroup(ABC):
    """A command's parameter whose options do not correspond to the fields of a single dataclass."""

    @classmethod
    @abstractmethod
    def options(cls) -> list[Option]: ...

    @classmethod
    @abstractmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        """Build the group from the values that typer has read."""


def _read_config(ctx: typer.Context, path: Path | None) -> None:
    """Take the options that the command line does not set from a file.

    Raises:
        FinetuneError: the file is no YAML of options.
        UnsupportedError: an option is unknown.
    """
    if path is None:
        return
    from pcg.train.config_file import parse_yaml

    values = parse_yaml(read_text(path, UnsupportedError), str(path))
    if not isinstance(values, Mapping):
        raise UnsupportedError(f"{path} has to be an object: an option and its value on each line")
    params = {each.name: each for each in ctx.command.params if each.name not in ("config", "help")}
    named = {str(name).replace("-", "_"): value for name, value in values.items()}
    try:
        check_names(named, params)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    ctx.default_map = {
        name: _typed(value, params[name]) for name, value in named.items() if value is not None
    }


def _typed(value: Any, option: Any) -> Any:
    """Return a value of a file as the texts that a command line has; a flag stays a bool."""
    if isinstance(value, Mapping):
        value = [f"{name}={_text(item)}" for name, item in value.items()]
    if isinstance(value, list):
        texts = [_text(item) for item in value]
        return texts if option.multiple or option.nargs > 1 else ",".join(texts)
    if isinstance(value, bool) and getattr(option, "is_flag", False):
        return value
    return [_text(value)] if option.multiple else _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_FEW = 16
_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="YAML file of option names and values; the command line takes precedence.",
            metavar="FILE.yaml",
            show_default=False,
            is_eager=True,
            callback=_read_config,
        ),
    ],
)
"""The option of commands with more than `_FEW` options."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command for typer: the fields of its dataclass parameters become options.

    Dataclasses that share a field name share the option. A command with many options also
    reads them from a file.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[Collect, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        group = _group(hint)
        if group is None:
            parameters[parameter.name] = parameter.replace(annotation=hint)
            continue
        collect, options = group
        groups[parameter.name] = collect, [option.name for option in options]
        for option in options:
            parameters.setdefault(option.name, option.parameter)

    if len(parameters) > _FEW:
        parameters.setdefault("config", _CONFIG)

    @functools.wraps(command)
    def call(**values: Any) -> None:
        taken = {name: value for name, value in values.items() if name in hints}
        present = {name: value for name, value in values.items() if value not in (None, [])}
        for name, (collect, names) in groups.items():
            taken[name] = collect({key: present[key] for key in names if key in present})
        command(**taken)

    keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters.values()]
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in keywords}
    return call


def _group(hint: Any) -> tuple[Collect, list[Option]] | None:
    """Return a parameter's builder and options; None if typer handles the parameter itself."""
    only = next((extra for extra in getattr(hint, "__metadata__", ()) if type(extra) is Only), None)
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if isinstance(plain, type) and issubclass(plain, OptionGroup):
        return plain.collect, plain.options()
    is_given = get_origin(plain) is Given
    owner: Any = get_args(plain)[0] if is_given else plain
    if not hasattr(owner, "__dataclass_fields__"):
        return None
    options = field_options(owner, only)

    def collect(present: Mapping[str, Any]) -> Any:
        values = {
            each.name: each.value(present[each.name]) for each in options if each.name in present
        }
        return Given(owner, values) if is_given else owner(**values)

    return collect, options


def field_options(owner: Any, only: Only | None = None) -> list[Option]:
    """Return an option for each field of a dataclass."""
    hints, docs = get_type_hints(owner), field_docs(owner)
    fields = [f for f in dataclasses.fields(owner) if only is None or f.name in only.names]
    names = [field.name for field in fields]
    return [
        Option(
            field.name,
            hints[field.name],
            help_text(docs[field.name], names),
            None if field.default_factory is not dataclasses.MISSING else field.default,
            _title(owner, field.name),
        )
        for field in fields
    ]


def _title(owner: Any, name: str) -> str | None:
    for base in inspect.getmro(owner):
        if name in inspect.get_annotations(base):
            return base.__dict__.get("title")
    return None


def help_text(doc: str, names: Collection[str] = ()) -> str:
    """Format a field's docstring entry as help: a sentence with option names for field names."""

    def called(match: re.Match[str]) -> str:
        return flags_of(match[1])[0] if match[1] in names else match[1]

    text = re.sub(r"`([^`]+)`", called, doc).replace("[", r"\[")
    if re.match(r"[a-z][a-z'-]*[\s,;:.]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "…")) else f"{text}."

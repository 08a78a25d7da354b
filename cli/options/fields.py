"""Options of the command line, made of the fields of dataclasses.

A command's function takes dataclasses, as `options: ExplainOptions`. Each of their fields is an
option with its name, type and default; its help is the field's entry in the docstring of its class,
and that class's `title`, where it has one, is the head under which help lists it. The library
declares most of the dataclasses, so that an option is named, documented and checked once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

import typer

from pcg.keywords import field_docs

from .types import convert, kind_of

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
"""The options of fields that have another name than theirs, or several."""

T = TypeVar("T")
Collect = Callable[[Mapping[str, Any]], Any]
"""A maker of a command's argument from the values of options."""


def flags_of(name: str) -> tuple[str, ...]:
    """The option of a field, as it is typed."""
    return FLAGS.get(name, (f"--{name.replace('_', '-')}",))


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: the field's name.
        hint: the field's type.
        help: the text that help shows.
        default: the value that help shows as the default; MISSING for an option that is required.
        title: the head under which help lists it; None for that of all others.
    """

    name: str
    hint: Any
    help: str
    default: Any = None
    title: str | None = None

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as typer takes it: a parameter, whose default is None."""
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
            annotation=Annotated[kind.given if is_required else kind.given | None, info],
        )

    def value(self, given: Any) -> Any:
        """The field's value. BadParameter: what was given is none."""
        try:
            return convert(given, self.hint)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=flags_of(self.name)[0]) from error


def _shown(default: Any) -> str:
    """A default as help shows it."""
    if isinstance(default, tuple):
        return ",".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


@dataclass(frozen=True)
class Given(Generic[T]):
    """The fields of a dataclass that the command line gives."""

    type: type[T]
    values: Mapping[str, Any]

    def make(self, **others: object) -> T:
        """The dataclass of the given fields, and of others where these are not given."""
        return self.type(**{**others, **self.values})


@dataclass(frozen=True)
class Only:
    """The fields of a dataclass that a command has options for; it stands in `Annotated`."""

    names: Collection[str]


class OptionGroup(ABC):
    """A parameter of a command that other options make than the fields of one dataclass."""

    @classmethod
    @abstractmethod
    def options(cls) -> list[Option]: ...

    @classmethod
    @abstractmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        """The group of what is given, as typer has read it."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, whose options are the fields of what a function takes.

    Options of one name, in two dataclasses, are one option.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[Collect, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        found = _group(hint)
        if found is None:
            parameters[parameter.name] = parameter.replace(annotation=hint)
            continue
        collect, options = found
        groups[parameter.name] = collect, [option.name for option in options]
        for option in options:
            parameters.setdefault(option.name, option.parameter)

    @functools.wraps(command)
    def call(**values: Any) -> None:
        taken = {name: value for name, value in values.items() if name in hints}
        given = {name: value for name, value in values.items() if value not in (None, [])}
        for name, (collect, names) in groups.items():
            taken[name] = collect({key: given[key] for key in names if key in given})
        command(**taken)

    keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters.values()]
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in keywords}
    return call


def _group(hint: Any) -> tuple[Collect, list[Option]] | None:
    """The maker of a parameter from options, and these; None if typer takes it as it is."""
    only = next((extra for extra in getattr(hint, "__metadata__", ()) if type(extra) is Only), None)
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if isinstance(plain, type) and issubclass(plain, OptionGroup):
        return plain.collect, plain.options()
    is_given = get_origin(plain) is Given
    owner: Any = get_args(plain)[0] if is_given else plain
    if not hasattr(owner, "__dataclass_fields__"):
        return None
    options = field_options(owner, only)

    def collect(given: Mapping[str, Any]) -> Any:
        values = {each.name: each.value(given[each.name]) for each in options if each.name in given}
        return Given(owner, values) if is_given else owner(**values)

    return collect, options


def field_options(owner: Any, only: Only | None = None) -> list[Option]:
    """The options of a dataclass's fields."""
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
    """The title of the class that declares a field."""
    for base in inspect.getmro(owner):
        if name in inspect.get_annotations(base):
            return base.__dict__.get("title")
    return None


def help_text(doc: str, names: Collection[str] = ()) -> str:
    """A field's text as help: a sentence, in which other fields are named by their options."""

    def called(found: re.Match[str]) -> str:
        return flags_of(found[1])[0] if found[1] in names else found[1]

    text = re.sub(r"`([^`]+)`", called, doc).replace("[", r"\[")
    if re.match(r"[a-z][a-z'-]*[\s,;:.]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "…")) else f"{text}."

"""Functions with the fields of a dataclass as keywords, typed and documented in the dataclass.

    @dataclass(frozen=True)
    class SaveArguments(SaveOptions):
        path: str

    @takes(SaveArguments)
    def save(arguments: SaveArguments) -> None: ...

is called as `save("model", sharded=True)`. It has the signature of the dataclass's constructor,
which type checkers, `help` and editors see. The error for an unknown keyword suggests the closest
field.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from pcg.errors import PcgError, UnsupportedError

Fields = ParamSpec("Fields")
Self = TypeVar("Self")
Result = TypeVar("Result")
Arguments = TypeVar("Arguments", covariant=True)


class Decorator(Protocol[Arguments, Fields]):
    """Replaces a function's dataclass parameter by the dataclass's fields."""

    @overload
    def __call__(self, function: Callable[[Arguments], Result]) -> Callable[Fields, Result]: ...
    @overload
    def __call__(
        self, function: Callable[[Self, Arguments], Result]
    ) -> Callable[Concatenate[Self, Fields], Result]: ...


def takes(
    arguments: Callable[Fields, Arguments], error: type[PcgError] = UnsupportedError
) -> Decorator[Arguments, Fields]:
    """Let a function or a method accept the fields of a dataclass and receive an instance.

    Args:
        arguments: the dataclass; its docstring documents the fields under `Attributes`.
        error: the class of the error for an unknown keyword.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped_signature = inspect.signature(function)
        fields = inspect.signature(arguments)
        before = list(wrapped_signature.parameters.values())[:-1]  # `self` of a method

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            check_names(keywords, fields.parameters, error)
            bound = fields.bind(*args[len(before) :], **keywords)
            return function(*args[: len(before)], arguments(*bound.args, **bound.kwargs))

        signature = fields.replace(
            parameters=[*before, *fields.parameters.values()],
            return_annotation=wrapped_signature.return_annotation,
        )
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _with_args(function.__doc__ or "", field_docs(arguments))
        return call

    return decorate


def check_names(
    names: Iterable[str], known: Iterable[str], error: type[PcgError] = UnsupportedError
) -> None:
    """Refuse an unknown name with an error that suggests the closest known name."""
    known = list(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ";"
            raise error(f"unknown option {name!r}{hint} the options are {', '.join(known)}")


@functools.cache
def field_docs(owner: Any) -> Mapping[str, str]:
    """Return the documentation of each field, from the docstrings of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(inspect.getmro(owner)):
        docs |= _entries(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
    return {name: docs[name] for name in inspect.signature(owner).parameters if name in docs}


_ENTRY = re.compile(r"^    (\w[\w, ]*): ((?:.+\n?)(?:^ {5,}.+\n?)*)", re.MULTILINE)


def _entries(docstring: str) -> dict[str, str]:
    _, _, section = docstring.partition("Attributes:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    entries: dict[str, str] = {}
    for match in _ENTRY.finditer(section):
        text = " ".join(match[2].split())
        entries |= dict.fromkeys(re.split(r",\s*", match[1]), text)
    return entries


def _with_args(docstring: str, docs: Mapping[str, str]) -> str:
    """Add the fields as section `Args` before the other sections of a docstring."""
    text = inspect.cleandoc(docstring)
    lines = "\n".join(["Args:", *(f"    {name}: {doc}" for name, doc in docs.items())])
    match = re.search(r"^(Returns|Raises|Yields):$", text, re.MULTILINE)
    if match is None:
        return f"{text}\n\n{lines}\n"
    return f"{text[: match.start()].rstrip()}\n\n{lines}\n{text[match.start() :]}\n"

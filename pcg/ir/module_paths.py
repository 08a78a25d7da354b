"""Paths of modules, such as `model.layers.3.self_attn.q_proj`: matching and naming.

Matched as in peft (peft 0.21.2: `check_target_module_exists`, `get_pattern_key`). Patterns come
from untrusted adapter_config.json files and may take exponential time, so the package `regex`
matches them, with a time limit and without blocking other threads; Python's `re` has neither.
"""

import contextlib
import difflib
import re
import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

import regex

from pcg.errors import AdapterError

_LONGEST = 10_000
"""Maximum number of characters of a pattern."""
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_LIMIT_S = 0.5
"""Maximum time to match a pattern against a path, in seconds."""

_Number = TypeVar("_Number", int, float)

WHOLE_MODEL = ""
"""Path of the model itself, for modules that an adapter has once; no target matches it."""

EACH_LAYER = "layers.{layer}"
"""Path of a layer's attention, of any name, for adapters with a network per layer."""


_OF_PARAMETER = ":"
_SWAPPED = ":mT"
_OF_EMBEDDING = ":embedding"


def parameter_path(source: str, experts: int, is_swapped: bool = False) -> str:
    """Return the path of a parameter that adapters adapt as such: module:parameter:experts[:mT].

    Args:
        source: the parameter's name in the model, with a leading dim for each expert if it has
            several.
        is_swapped: True if peft takes its inputs for outputs.
    """
    module, _, name = source.rpartition(".")
    return _OF_PARAMETER.join((module, name, str(experts))) + _SWAPPED * is_swapped


def is_swapped(path: str) -> bool:
    """Return whether peft takes the inputs of the path's parameter for outputs."""
    return path.endswith(_SWAPPED)


def parameter_of(path: str) -> tuple[str, int] | None:
    """Return the name and the number of experts of a parameter's path; None for a module's path."""
    module, *rest = path.removesuffix(_SWAPPED).split(_OF_PARAMETER)
    return (f"{module}.{rest[0]}", int(rest[1])) if len(rest) == 2 else None


def embedding_path(module: str) -> str:
    """Return the path of a token embedding that adapters adapt: module:embedding."""
    return module + _OF_EMBEDDING


def is_embedding(path: str) -> bool:
    """Return whether the path is of `embedding_path`."""
    return path.endswith(_OF_EMBEDDING)


def module_name(path: str) -> str:
    """Return the module's path in the model, without the mark of an embedding."""
    return path.removesuffix(_OF_EMBEDDING)


def layer_path(layer: int) -> str:
    """Return the path of a layer's attention."""
    return EACH_LAYER.format(layer=layer)


def is_module(path: str) -> bool:
    """Return whether the path is a module's, and not the root or a list above modules."""
    return path != WHOLE_MODEL and re.fullmatch(r"layers\.\d+", path) is None


def ends_in(path: str, names: Iterable[str]) -> bool:
    """Return whether the path ends in `.name` for any of the names."""
    return path.endswith(tuple(f".{name}" for name in names))


def match_start(pattern: str, path: str, within: str = "{}") -> regex.Match[str] | None:
    """Match the regex from the start of the path; `within` has {} in the place of the pattern.

    Raises:
        AdapterError: the pattern is no regex, is too long, or takes too long.
    """
    if len(pattern) > _LONGEST:
        raise AdapterError(
            f"the regex {pattern[:40]!r}… has {len(pattern)} characters, and may have {_LONGEST}; "
            "name the modules in a list"
        )
    started = time.thread_time()
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                return regex.compile(within.replace("{}", pattern)).match(
                    path, timeout=_LIMIT_S, concurrent=True
                )
            # The library's clock goes on where other work keeps this thread waiting.
            if time.thread_time() - started > _LIMIT_S / 2:
                raise AdapterError(
                    f"matching the regex {pattern!r} against {path!r} takes more than "
                    f"{_LIMIT_S:g} s; name the modules in a list, or write it without repeated "
                    "groups that repeat"
                )
    except (regex.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{pattern!r} is not a regex: {error}") from error


def matches_whole(pattern: str, path: str) -> bool:
    """Return whether the regex matches the whole path; raises as `match_start`."""
    return match_start(pattern, path, r"(?:{})\Z") is not None


def is_plain(pattern: str) -> bool:
    """Return whether a regex has only letters, digits, _ and dots, as paths do."""
    return _PLAIN.fullmatch(pattern) is not None


def matches_end(pattern: str, path: str) -> bool:
    """Return whether the regex matches the path or a dotted suffix; raises as `match_start`."""
    if is_plain(pattern):  # the fast path for configurations with hundreds of entries
        end = path[-len(pattern) :]
        before = path[: len(path) - len(pattern)]
        is_long = len(end) == len(pattern) and (not before or before.endswith("."))
        return is_long and all(a in (b, ".") for a, b in zip(pattern, end, strict=True))
    return match_start(pattern, path, r"(.*\.)?({})$") is not None


def first_match(patterns: Mapping[str, _Number], path: str, default: _Number) -> _Number:
    """Return the value of the first regex that matches the end of the path."""
    for pattern, value in patterns.items():
        if matches_end(pattern, path):
            return value
    return default


def name_list(paths: Iterable[str]) -> str:
    """Return the last components of the paths, for a message."""
    return f"the names are {', '.join(_last_names(paths)) or '(none)'}"


def did_you_mean(name: str, paths: Iterable[str]) -> str:
    """Return names and paths spelled similarly to `name`, for a message; may be empty."""
    paths = list(paths)
    close = difflib.get_close_matches(name.rpartition(".")[2], _last_names(paths), n=3)
    close += difflib.get_close_matches(name, paths, n=1) if "." in name else []
    return f"; did you mean {', '.join(dict.fromkeys(close))}?" if close else ""


def _last_names(paths: Iterable[str]) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})

"""Paths of modules, such as `model.layers.3.self_attn.q_proj`: matching them, and naming them.

Matched as peft does (peft 0.21.2: `check_target_module_exists`, `get_pattern_key`).
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

_Number = TypeVar("_Number", int, float)

WHOLE_MODEL = ""
"""The path of the model itself, where an adapter has something once; no target means it."""

EACH_LAYER = "layers.{layer}"
"""The path of a layer's attention, whatever it is called, where an adapter has one for each."""


def layer_path(layer: int) -> str:
    """The path of one layer's attention."""
    return EACH_LAYER.format(layer=layer)


def is_module(path: str) -> bool:
    """Return whether the path is a module's own, not one of those above, which no target means."""
    return path != WHOLE_MODEL and re.fullmatch(r"layers\.\d+", path) is None


def ends_in(path: str, names: Iterable[str]) -> bool:
    """Return whether the path ends in `.name` for one of the names."""
    return path.endswith(tuple(f".{name}" for name in names))


def matches_end(pattern: str, path: str) -> bool:
    """Return whether the regex matches the path, or all of it behind a dot."""
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def first_match(patterns: Mapping[str, _Number], path: str, default: _Number) -> _Number:
    """The value of the first regex that matches the end of the path."""
    for pattern, value in patterns.items():
        if matches_end(pattern, path):
            return value
    return default


def name_list(paths: Iterable[str]) -> str:
    """The last components of the paths, for a message."""
    return f"the names are {', '.join(_last_names(paths)) or '(none)'}"


def did_you_mean(name: str, paths: Iterable[str]) -> str:
    """Names and paths that are spelled like `name`, for a message; empty if there are none."""
    paths = list(paths)
    close = difflib.get_close_matches(name.rpartition(".")[2], _last_names(paths), n=3)
    close += difflib.get_close_matches(name, paths, n=1) if "." in name else []
    return f"; did you mean {', '.join(dict.fromkeys(close))}?" if close else ""


def _last_names(paths: Iterable[str]) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})

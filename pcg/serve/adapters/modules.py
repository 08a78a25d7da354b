"""Static modules: the adapters that `--lora-modules` names, which are there from the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pcg.errors import ServeError
from pcg.files import expanded, is_file, shown_path
from pcg.peft.adapter_files import CONFIG


@dataclass(frozen=True)
class LoraModule:
    """A static adapter; `base_model_name` is what its card calls its parent, if it is given."""

    name: str
    path: Path
    base_model_name: str | None = None


def parse_modules(given: Sequence[str]) -> list[LoraModule]:
    """Read `NAME=PATH`, or a JSON object of name, path and base_model_name, as vLLM has it.

    Raises:
        ServeError: a text is neither, or a name comes twice.
    """
    modules = [_parse(text) for text in given]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ServeError(f"--lora-modules has {name!r} twice; give each its own name")
    return modules


def check_modules(given: Sequence[str]) -> None:
    """Raise a ServeError for a module that is none, or whose folder holds no adapter."""
    for module in parse_modules(given):
        if not is_file(module.path / CONFIG):
            raise ServeError(
                f"--lora-modules {module.name}={shown_path(module.path)}: no {CONFIG} is there; "
                "give the folder of a saved adapter"
            )


def _parse(text: str) -> LoraModule:
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ServeError(f"--lora-modules {text} is no JSON: {error}") from error
        unknown = fields.keys() - {"name", "path", "base_model_name"}
        texts = [fields.get("name"), fields.get("path"), fields.get("base_model_name", "")]
        if not unknown and all(isinstance(one, str | None) for one in texts) and all(texts[:2]):
            name, path, base = texts
            return LoraModule(name, expanded(path), base or None)
    else:
        name, equals, path = text.partition("=")
        if name and equals and path:
            return LoraModule(name, expanded(path))
    raise ServeError(
        f'--lora-modules {text}; use NAME=PATH, or {{"name": …, "path": …, "base_model_name": …}}'
    )

"""The files beside tokenizer.json: special tokens, their ids, the chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pcg.errors import ConfigError
from pcg.runtime.text.chat import ChatTemplate

Json = Mapping[str, Any]

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json(path: Path) -> Json:
    """Read the object in a JSON file; {} without such a file. ConfigError: it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON, or bad UTF-8
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def special_texts(config: Json, special_tokens_map: Json) -> dict[str, str]:
    """Return the texts of the named special tokens; tokenizer_config.json takes precedence.

    A token is given as its text, or as an object with its text under "content".
    """
    texts = {}
    for name in NAMED_TOKENS:
        token = config[name] if name in config else special_tokens_map.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str) and token:
            texts[name] = token
    return texts


def ids_of(name: str, files: Mapping[str, Json]) -> tuple[int, ...]:
    """Return the ids that the first file with a value gives for `name`; ConfigError if not ids."""
    for file, content in files.items():
        value = content.get(name)
        if value is None or value == -1:  # some models write -1 for a token they do not have
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(index) is int and index >= 0 for index in ids):
            raise ConfigError(f"{file} has {name}={value!r}; expected an id or a list of ids")
        return tuple(ids)
    return ()


def find_template(
    directory: Path, config: Json, override: str | Path | None
) -> ChatTemplate | None:
    """Return the chat template: the override, chat_template.jinja, or tokenizer_config.json's.

    ConfigError: the file is missing, or the template is not valid.
    """
    if override is not None:
        return ChatTemplate({"default": _override_text(override)})
    sources: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        try:
            sources = {entry["name"]: entry["template"] for entry in given}
        except (KeyError, TypeError) as error:
            raise ConfigError(
                'tokenizer_config.json: a list in "chat_template" holds objects with "name" and '
                '"template"'
            ) from error
    elif given is not None:
        raise ConfigError(
            f'tokenizer_config.json: "chat_template" is a {type(given).__name__}; expected text'
        )
    named = directory / "additional_chat_templates"
    for path in sorted(named.glob("*.jinja")) if named.is_dir() else []:
        sources[path.stem] = path.read_text(encoding="utf-8")
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources["default"] = file.read_text(encoding="utf-8")
    return ChatTemplate(sources) if sources else None


def _override_text(override: str | Path) -> str:
    """Return a template's text, read from its file if a path is given."""
    # A template has braces; a path to one hardly does.
    if isinstance(override, str) and "{" in override:
        return override
    path = Path(override)
    if not path.is_file():
        raise ConfigError(f"no chat template file {path}; give a path, or the template's text")
    return path.read_text(encoding="utf-8")

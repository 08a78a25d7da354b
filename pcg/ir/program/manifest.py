"""The manifest of a program's folder: data that no other file holds, and each file's hash."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcg.errors import ProgramError
from pcg.files import expanded, is_directory, is_file, is_there, json_object, shown_path
from pcg.files import read_bytes as read_file
from pcg.units import shown
from pcg.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
AGAIN = "; compile again"


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        format: the folder's format; `FORMAT` is the newest that this pcg reads.
        versions: the versions of pcg, torch and transformers that compiled the model.
        dtype: the dtype of weights and activations, in the IR's names.
        base_prefix: name of the base model within the causal LM.
        renamings: see `Program`; older folders have none.
        weights: directory or hub id of the weights; None when compiled without a source.
        recipes: the fields of each adapter's recipe by name, unchecked.
        files: SHA-256 of every other file, in hexadecimal, by its path in the folder.
        choices: see `Program`; older folders have none.
    """

    format: int
    versions: Mapping[str, str]
    model: str
    dtype: str
    base_prefix: str
    weights: str | None
    recipes: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, str]
    renamings: Sequence[Sequence[str]]
    choices: Mapping[str, str]


def is_program_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a compiled program, even a damaged one."""
    return is_file(expanded(path) / MANIFEST)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and check a folder's manifest; raises ProgramError."""
    folder = expanded(directory)
    path = folder / MANIFEST
    again = compile_again(folder)
    if not is_directory(folder):
        kind = "a file" if is_there(folder) else "not there"
        raise ProgramError(f"{shown_path(folder)} is {kind}; {again}")
    if not is_file(path):
        raise ProgramError(f"{folder} has no {MANIFEST}: it is not a program; {again}")
    content = json_object(read_bytes(path), str(path), ProgramError, AGAIN)
    version = content.get("format")
    if type(version) is not int or version < 1:
        raise ProgramError(f'{path} has "format": {shown(version)}; {again}')
    if version > FORMAT:
        versions = content.get("versions")
        writer = versions.get("pcg") if isinstance(versions, dict) else None
        raise ProgramError(
            f"{folder} is of format {shown(version)}, written by pcg {writer or '(unknown)'}; this "
            f"is pcg {__version__}, which reads up to format {FORMAT}; update pcg, or compile again"
        )
    content.setdefault("choices", {})
    content.setdefault("renamings", [])
    for name, kind in _KINDS.items():
        if name not in content or not isinstance(content[name], kind):
            state = "damaged" if name in content else "missing"
            raise ProgramError(f'{path}: "{name}" is {state}; {again}')
    if not all(map(_is_renaming, content["renamings"])):
        raise ProgramError(f'{path}: "renamings" is damaged; {again}')
    unknown = sorted(set(content) - set(_KINDS))
    if unknown:
        raise ProgramError(f'{path} has "{unknown[0]}", which no manifest has; {again}')
    for name, digest in content["files"].items():
        parts = Path(name).parts
        if not isinstance(digest, str) or not parts or Path(name).is_absolute() or ".." in parts:
            raise ProgramError(f"{path} names {name!r}, which is no file of it; {again}")
    return Manifest(**content)


def _is_renaming(value: object) -> bool:
    """Return whether a value is a regex and a replacement."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) is str for x in value):
        return False
    try:
        re.sub(value[0], value[1], "")
    except re.error:
        return False
    return True


_KINDS: Mapping[str, Any] = {
    "format": int,
    "versions": dict,
    "model": str,
    "dtype": str,
    "base_prefix": str,
    "weights": str | None,
    "recipes": dict,
    "files": dict,
    "renamings": list,
    "choices": dict,
}


def read_bytes(path: Path) -> bytes:
    """Read a file of a folder; ProgramError if it is missing or unreadable."""
    if not is_there(path):
        raise ProgramError(
            f"{path.name} is missing from {path.parent}; {compile_again(path.parent)}"
        )
    return read_file(path, ProgramError)


def compile_again(folder: Path) -> str:
    """Return the fix at the end of a message."""
    return f"compile it: pcg compile MODEL -o {shown_path(folder)}"


def json_text(value: object, what: str = "it") -> str:
    """Encode JSON as in the folder; ProgramError if JSON cannot hold the value."""
    try:
        return json.dumps(value, indent=2) + "\n"
    except (RecursionError, TypeError, ValueError) as error:
        raise ProgramError(f"{what} cannot be saved as JSON: {error}") from error

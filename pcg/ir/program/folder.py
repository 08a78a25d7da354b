"""The folder of a compiled program: its files, the tokenizer's, and a manifest with their hashes.

A folder is written under a temporary name and then renamed, so that readers always find the old or
the new program. It holds no weights: the manifest has their place. Loading compares the SHA-256 of
every file with the manifest, and names each fault and its fix.

The emitted source is meant to be read, and may be edited: such a folder loads only with
`trust_edits=True`, because loading a program runs its source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pcg.errors import ProgramError
from pcg.files import check_writable, damage_of, exchange, expanded, json_object, sync
from pcg.ir.program.files import (
    PLAN,
    REQUIRED,
    SOURCES,
    files_of,
    options_from,
    program_from,
)
from pcg.ir.program.manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    Manifest,
    compile_again,
    json_text,
    read_bytes,
    read_manifest,
)
from pcg.ir.program.program import Program
from pcg.options import CompileOptions
from pcg.version import __version__

REPORT = "report.json"
_LEFT_S = 3600.0
"""Age of a folder beside a program that no process still writes, seconds."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def options_of(directory: str | os.PathLike[str]) -> CompileOptions:
    """The options that a program was compiled with. ProgramError: they cannot be read."""
    path = expanded(directory) / PLAN
    plan = json_object(read_bytes(path), str(path), ProgramError, AGAIN)
    dtype = read_manifest(directory).dtype
    with damage_of(str(path), ProgramError, AGAIN):
        return options_from(plan, dtype)


# ------------------------------------------------------------------------------------------- save


def save_program(
    program: Program,
    directory: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    tokenizer_directory: str | os.PathLike[str] | None = None,
    report: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a program's folder, replacing an existing program, and return its manifest.

    Args:
        weights: directory or hub id of the weights, for the manifest.
        tokenizer_directory: directory of the tokenizer's files, which are copied.
        report: the report of `pcg explain`, as JSON.
    Raises:
        ProgramError: it cannot be written, or the folder holds other files.
    """
    target = free_folder(directory)
    files = files_of(program)
    if report is not None:
        files[REPORT] = json_text(report, "the report").encode()
    beside = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    try:
        if tokenizer_directory is not None:
            files |= _tokenizer_files(Path(tokenizer_directory))
        manifest = Manifest(
            FORMAT,
            _versions(),
            program.name,
            dtype=program.dtype,
            base_prefix=program.base_prefix,
            weights=None if weights is None else os.fspath(weights),
            recipes=program.recipes,
            files={name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)},
            choices=program.choices,
        )
        files[MANIFEST] = json_text(dataclasses.asdict(manifest), "the manifest").encode()
        beside.mkdir(parents=True)
        for name, content in files.items():
            _write(beside / name, content)
        _replace(target, beside)
        _sweep(target)
    except OSError as error:
        size_bytes = sum(map(len, files.values()))
        raise ProgramError(
            f"{target} cannot be saved ({size_bytes} bytes): {error.strerror or error}; what was "
            "there is as it was"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def free_folder(directory: str | os.PathLike[str]) -> Path:
    """Check that a program can be written to a directory, and return its path.

    Raises:
        ProgramError: it cannot be written to, or holds files that are not a program's.
    """
    target = expanded(directory)
    check_writable(target, "the program", ProgramError)
    if target.is_symlink():  # rename what it points to, not the link
        target = target.resolve()
    existing = {p.relative_to(target).as_posix() for p in target.rglob("*") if not p.is_dir()}
    if not existing:
        return target
    if MANIFEST not in existing:
        raise ProgramError(
            f"{target} is not empty and not a compiled program (it has {min(existing)}); give a "
            "new folder"
        )
    try:
        others = existing - {MANIFEST, *read_manifest(target).files}
    except ProgramError as error:
        raise ProgramError(
            f"{target} holds a program that cannot be read ({error}), so which of its files are "
            "others' is not known; remove it, or give a new folder"
        ) from error
    if others:
        raise ProgramError(
            f"{target} holds a program and {len(others)} other file{'s' * (len(others) > 1)}, such "
            f"as {min(others)}, which replacing it would delete; move them, or give a new folder"
        )
    return target


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for pattern in TOKENIZER_FILES
        for path in directory.glob(pattern)
        if path.is_file()
    }


def _versions() -> dict[str, str]:
    versions = {"pcg": __version__}
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    sync(path)


def _replace(target: Path, new: Path) -> None:
    """Rename `new` to `target`, and remove the old program afterwards.

    Where the file system cannot exchange folders, a process killed between two renames leaves the
    old program in a folder with the suffix `-old`.
    """
    if not target.exists():
        new.rename(target)
        return
    if exchange(new, target):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = new.with_name(f"{new.name}-old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove the temporary folders of killed processes."""
    name = re.compile(re.escape(f".{target.name}-") + "[0-9a-f]{8}(-old)?")
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            is_left = name.fullmatch(path.name) and time.time() - path.lstat().st_ctime > _LEFT_S
            if is_left and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------- load


def load_program(directory: str | os.PathLike[str], *, trust_edits: bool = False) -> Program:
    """Read a program's folder.

    Args:
        trust_edits: accept edits of emitted source, the tokenizer's files and the report. Loading a
            program runs its source.
    Raises:
        ProgramError: the folder is missing, damaged, edited, or of a newer pcg; says the fix.
    """
    folder = expanded(directory)
    manifest = read_manifest(folder)
    files = {}
    for name, expected in manifest.files.items():
        files[name] = read_bytes(folder / name)
        digest = hashlib.sha256(files[name]).hexdigest()
        if digest != expected:
            _check_edit(folder, name, digest, expected, trust_edits)
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        raise ProgramError(f"{folder / MANIFEST} names no {missing[0]}; {compile_again(folder)}")
    try:
        return program_from(files, manifest)
    except ProgramError as error:
        raise ProgramError(f"{folder}: {error}") from error


def _check_edit(folder: Path, name: str, digest: str, expected: str, trust_edits: bool) -> None:
    hashes = f"SHA-256 {digest[:8]}…, compiled as {expected[:8]}…"
    if name not in SOURCES and (name in REQUIRED or name.endswith(".pcg")):
        raise ProgramError(
            f"{folder / name} is damaged or was edited ({hashes}); only the emitted source may be "
            f"edited: {compile_again(folder)}"
        )
    if not trust_edits:
        raise ProgramError(
            f"{folder / name} was edited ({hashes}); if the edit is meant, accept it: "
            f"--trust-edits (trust_edits=True); else {compile_again(folder)}"
        )

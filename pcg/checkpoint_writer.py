"""Writes a model's folder: safetensors files of bounded size, config.json, and the files beside it.

A folder is written beside its place and renamed, so that a crash or a full disk never leaves a part
of a model there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from pcg.errors import UnsupportedError, WeightsError
from pcg.files import check_writable, exchange, expanded, sync, sync_names
from pcg.source import CONFIG, DOWNLOADED, INDEX, WEIGHTS, ModelSource
from pcg.units import parse_bytes, size_text

_COPIED = (
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    *(name for name in DOWNLOADED if "safetensors" not in name and name != CONFIG),
)
"""Files of a model beside its weights and its config."""


def free_folder(
    output: str | os.PathLike[str],
    what: str,
    base: Path | None = None,
    *,
    overwrite: bool | None = None,
) -> Path:
    """Return the path of a folder to write, after a test of its place.

    Args:
        what: the content to save, for errors.
        base: a folder that is read while this one is written.
        overwrite: allow a folder with files, which the new folder replaces; None if the caller has
            no such option.
    Raises:
        WeightsError: the folder cannot be written, has files, or is the base's own.
    """
    target = expanded(output)
    check_writable(target, what, WeightsError)
    target = target.resolve()
    if base is not None and target == base.resolve():
        raise WeightsError(f"{target} holds the base itself; give another folder for {what}")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        option = "" if overwrite is None else ", or overwrite=True (--overwrite)"
        raise WeightsError(f"{target} is not empty; give a new folder for {what}{option}")
    return target


def free_file(
    output: str | os.PathLike[str], what: str, base: Path | None = None, *, overwrite: bool = False
) -> Path:
    """Return the path of a file to write, after a test of its place; see `free_folder`."""
    target = expanded(output)
    check_writable(target.parent, what, WeightsError)
    target = target.resolve()
    if base is not None and target == base.resolve():
        raise WeightsError(f"{target} is the base itself; give another file for {what}")
    if target.is_dir() or (target.exists() and not overwrite):
        raise WeightsError(f"{target} exists; give another file, or overwrite=True (--overwrite)")
    return target


def check_room(target: Path, size_bytes: int, what: str) -> None:
    """Refuse a disk without room for a folder or file to write. WeightsError: names the sizes."""
    place = target
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if size_bytes > free:
        raise WeightsError(
            f"{what} takes {size_text(size_bytes)}, and {place} has {size_text(free)} free; give a "
            "place on another disk"
        )


def shard_limit(text: str) -> int:
    """Return the bytes of a size such as 2GB. UnsupportedError: the text is none."""
    limit = parse_bytes(text)
    if not limit:
        raise UnsupportedError(f"max_shard_size={text!r}; use a size with a unit, such as 2GB")
    return limit


def write_checkpoint(
    target: Path,
    source: ModelSource,
    config: Mapping[str, Any],
    tensors: Iterator[tuple[str, Tensor]],
    limit: int,
    what: str,
) -> None:
    """Write a model's folder, in place of a folder at `target`.

    Args:
        source: the model with the tokenizer and the other files to copy.
        config: the content of config.json.
        tensors: names and tensors in the order of the files.
        limit: the largest size of a file of several tensors, bytes.
        what: the content, for errors.
    Raises:
        WeightsError: the folder cannot be written.
    """
    beside = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    try:
        beside.mkdir(parents=True)
        _write_weights(beside, tensors, limit)
        _write_others(beside, source, config)
        for path in beside.iterdir():
            if path.is_file():
                shutil.copymode(beside / CONFIG, path)  # safetensors lets the owner alone read
                sync(path)
        if not (target.is_dir() and any(target.iterdir())):
            beside.rename(target)
        elif not exchange(beside, target):
            shutil.rmtree(target)
            beside.rename(target)
        sync_names(target.parent)
    except OSError as error:
        raise WeightsError(
            f"{what} cannot be saved in {target}: {error.strerror or error}; give another folder"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]], limit: int) -> None:
    """Write safetensors files of at most `limit` bytes, or of a single tensor, and their index."""
    files: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    total_bytes = batch_bytes = 0

    def flush() -> None:
        save_file(batch, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(batch))
        batch.clear()

    for name, tensor in tensors:
        if batch and batch_bytes + tensor.nbytes > limit:
            flush()
            batch_bytes = 0
        batch[name] = tensor.contiguous()
        batch_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "0.part").rename(folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_others(folder: Path, source: ModelSource, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if source.directory is None:
        return
    for pattern in _COPIED:
        for path in source.directory.glob(pattern):
            if path.is_file():
                place = folder / path.relative_to(source.directory)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place)

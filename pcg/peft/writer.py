"""Write adapters in peft's format, so that a crash or a full disk leaves no half of one.

The keys are those of `reader`, the configuration's fields those of the recipe. peft's model card,
README.md, is not written.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pcg.errors import AdapterError
from pcg.files import (
    SUMS,
    check_writable,
    expanded,
    is_file,
    read_sums,
    seal,
    sha256_of,
    sync_names,
    write_sums,
)
from pcg.peft.adapter import Adapter
from pcg.peft.reader import CONFIG, PREFIX, SHARED_PREFIX, WEIGHTS
from pcg.peft.weights import ModuleWeights


def write_adapter(adapter: Adapter, path: str | os.PathLike[str]) -> None:
    """Save an adapter in a directory so that peft reads it, too.

    The files are written whole beside where they go, then renamed: whatever happens, a file at
    `path` is the old one or the new one, and SHA256SUMS there holds for it. An equal config stays
    as it is, so that saving an adapter again replaces one file of its own, in one step. Other files
    in the directory stay.

    Raises:
        AdapterError: it cannot be written, or its weights are not those of its recipe.
    """
    directory = expanded(path)
    files = _files_of(adapter)
    check_writable(directory, f"adapter {adapter.name!r}", AdapterError)
    if directory.is_symlink():  # rename what it points to, not the link
        directory = directory.resolve()
    is_new = not directory.exists()
    # Within the directory if there is one, which may be all of a file system.
    parent = directory.parent if is_new else directory
    beside = parent / f".saving-{secrets.token_hex(4)}"
    state = "nothing was left there" if is_new else "the files there are as they were"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        _write_files(files, beside)
        seal(beside)
        if is_new:
            beside.rename(directory)
        else:
            before = _sums_before(directory)
            sums = read_sums(beside, AdapterError) or {}
            if is_file(directory / SUMS):
                write_sums(directory, {**before, **{n: sums[n] | before[n] for n in sums}})
            (beside / WEIGHTS).replace(directory / WEIGHTS)
            if not _holds(directory / CONFIG, files.config):
                state = f"{WEIGHTS} there is the new one, {CONFIG} is not: save again"
                (beside / CONFIG).replace(directory / CONFIG)
            sync_names(directory)
            write_sums(directory, {**before, **sums})
        sync_names(parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        size_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
        raise AdapterError(
            f"adapter {adapter.name!r} ({size_bytes} bytes) cannot be saved in {directory}: "
            f"{reason}; {state}"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sums_before(directory: Path) -> dict[str, set[str]]:
    """Return the digests of the adapter that is there, and of what else SHA256SUMS names."""
    try:
        sums = read_sums(directory, AdapterError) or {}
    except AdapterError:  # damaged: it is replaced
        sums = {}
    for name in (WEIGHTS, CONFIG):
        file = directory / name
        sums.setdefault(name, {sha256_of(file)} if is_file(file) else set())
    return sums


def write_adapter_files(adapter: Adapter, directory: Path) -> None:
    """Write an adapter's files into a directory that is made of more, which its maker seals.

    Raises:
        AdapterError: its weights are not those of its recipe.
        OSError, SafetensorError: it cannot be written.
    """
    files = _files_of(adapter)
    directory.mkdir(parents=True, exist_ok=True)
    _write_files(files, directory)


@dataclass(frozen=True)
class _Files:
    """The contents of an adapter's two files; tensors by peft's keys."""

    config: str
    tensors: Mapping[str, Tensor]


def _files_of(adapter: Adapter) -> _Files:
    tensors = _tensors_to_write(adapter)
    # The keys of the patterns stay in order: the first that matches counts.
    return _Files(json.dumps(dict(sorted(_config_to_write(adapter).items())), indent=2), tensors)


def _write_files(files: _Files, directory: Path) -> None:
    write_tensors(directory / WEIGHTS, files.tensors, {"format": "pt"})
    (directory / CONFIG).write_text(files.config, encoding="utf-8")


def digest_of(adapter: Adapter) -> str:
    """Return `sha256:` and the hexadecimal SHA-256 of what `write_adapter` writes of an adapter.

    Hashed are the fields of adapter_config.json, as JSON with sorted keys and lists of names sorted
    too, then the tensors in the order of their keys: key, dtype and shape as JSON, and the bytes. A
    file saved and read again has the same digest, wherever it lies and whatever its adapter's name.
    """
    fields = {
        key: sorted(value) if isinstance(value, list) and all(map(_is_text, value)) else value
        for key, value in _config_to_write(adapter).items()
    }
    digest = hashlib.sha256(json.dumps(dict(sorted(fields.items()))).encode())
    for key, tensor in sorted(_tensors_to_write(adapter).items()):
        shape = [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        digest.update(json.dumps([key, *shape]).encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _config_to_write(adapter: Adapter) -> dict[str, Any]:
    """The fields with names of modules, or their paths where the recipe has none."""
    recipe = adapter.recipe
    targets = recipe.target_modules
    if targets is None or recipe.is_all_linear:
        targets = sorted(adapter.weights)
    return recipe.config_fields(targets, adapter.base_model_name, adapter.extra)


def _tensors_to_write(adapter: Adapter) -> dict[str, Tensor]:
    """The tensors by peft's keys."""
    tensors: dict[str, Tensor] = {}
    for path, weights in adapter.weights.items():
        _check_bypass(adapter, path, weights)
        for suffix, tensor in weights.stored.items():
            tensors[f"{PREFIX}{path}.{suffix}"] = tensor
    for path, bias in adapter.biases.items():
        layer = ".base_layer" if path in adapter.weights else ""
        tensors[f"{PREFIX}{path}{layer}.bias"] = bias
    kind = adapter.recipe.weights
    tensors |= kind.stored_whole(adapter.weights)
    if kind.shared_is_stored(adapter.recipe):
        for name, tensor in adapter.shared.items():
            tensors[f"{SHARED_PREFIX}{name}"] = tensor
    return tensors


def _check_bypass(adapter: Adapter, path: str, weights: ModuleWeights) -> None:
    """Refuse weights that a reader of the config would use otherwise."""
    recipe = adapter.recipe
    if recipe.target_modules is not None and recipe.bypass(path) is None:
        raise AdapterError(
            f"adapter {adapter.name!r} has weights for {path}, which its recipe does not target"
        )
    bypass = recipe.bypass_at(path)
    if weights.bypass != bypass:
        raise AdapterError(
            f"adapter {adapter.name!r} has {weights.bypass} at {path}, its recipe gives {bypass}"
        )


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; `seal` of its folder waits for the disk."""
    save_file({key: _own_copy(tensor) for key, tensor in tensors.items()}, file, metadata)


def _own_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to("cpu").contiguous()
    # A row of a pool shares its storage, which safetensors refuses.
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor

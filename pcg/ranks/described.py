"""Texts of arguments, which are equal on two ranks where the arguments mean the same."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor


def described(value: object) -> str:
    """The text of a value: a plain one's own, the fields of a dataclass, a digest of a tensor.

    An object of another kind, such as a callback or a policy, is described by its type and its
    plain attributes, as it has no text that is alike in two processes.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} {tensor_digest(value)}"
    if isinstance(value, Mapping):
        pairs = sorted((described(key), described(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(described, value))}]"
    return _described_object(value)


def _described_object(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return f"{name}({described(fields_of(value))})"
    plain = (bool, int, float, str, Enum, type(None))
    kept: Mapping[str, object] = getattr(value, "__dict__", {})
    return f"{name}({described({k: each for k, each in kept.items() if isinstance(each, plain)})})"


def fields_of(value: Any, leave: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass by their names, without some."""
    names = (each.name for each in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if name not in leave}


def tensor_digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes, as hexadecimal digits."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def tokens_digest(sequences: Iterable[Sequence[int]]) -> str:
    """The SHA-256 of sequences of token ids, as hexadecimal digits."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.hexdigest()

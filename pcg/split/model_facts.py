"""A model's identity, as a base and its clients compare it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.kernels.torch.remote_weights import is_remote, remote_of
from pcg.runtime.model.base_weights import WeightStore

_MOST_THREADS = 8
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""Files of a model's directory that a tokenizer is read from."""
_NEUTRAL = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Fields of a configuration that do not change what a model computes."""


def weight_digests(weights: WeightStore) -> dict[str, str]:
    """Return the SHA-256 of the `row_digests` of each frozen tensor, as it is computed with."""

    def digest(item: tuple[str, Parameter]) -> str:
        tensor = weights.whole(*item)
        if is_remote(tensor):
            return remote_of(tensor).digest()
        return hashlib.sha256(row_digests(tensor)).hexdigest()

    frozen = dict(weights.frozen())
    with hashing_threads() as pool:
        return dict(zip(frozen, pool.map(digest, frozen.items()), strict=True))


def row_digests(tensor: Tensor) -> bytes:
    """Return the SHA-256 of each row of a tensor, one behind the other; a vector is one row.

    So ranks that hold some rows each tell of the whole tensor what a process does that has it.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu").contiguous()
    return b"".join(hashlib.sha256(row).digest() for row in rows.view(torch.uint8).numpy())


def hashing_threads() -> ThreadPoolExecutor:
    """Return threads for `row_digests`, which runs without the interpreter's lock."""
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, torch.get_num_threads())))


def weights_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Say which tensors make two models different by their `weight_digests`; empty if none does."""
    found = [name for name in one if one[name] != other.get(name)]
    if not found:
        return ""
    rest = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{rest} of {len(one)} tensors"


def config_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as text, the same for equal ones."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":"), default=str)


def config_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say which fields make two configurations different models; empty if none does."""
    keys = sorted(one.keys() & other.keys() - set(_NEUTRAL))
    found = [
        f"{key}={one[key]!r}, not {other[key]!r}"
        for key in keys
        if json.dumps(one[key], default=str) != json.dumps(other[key], default=str)
    ]
    return ", ".join(found[:3])

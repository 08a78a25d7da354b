"""A model's identity, as a base and its clients compare it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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

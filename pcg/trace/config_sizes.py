"""The numbers of a configuration, which are its own: no size is a default of transformers'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.errors import ConfigError
from pcg.units import shown

_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_SIZES = (
    *_NEEDED,
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "num_key_value_heads",
    "vocab_size",
)
_MOST_LAYERS = 1024
"""Models have up to a few hundred; transformers builds each of them."""
_OTHER_NAMES: Mapping[str, Sequence[str]] = {"hidden_size": ("n_embed",)}
"""Names that checkpoints have, and `attribute_map` has not: BLOOM's."""


def check_sizes(fields: Mapping[str, Any], config_class: Any) -> None:
    """Refuse sizes that no model has, before transformers reads them.

    Raises:
        ConfigError: a size is less than 1, or no whole number; or there are more layers than any
            model has.
    """
    for name in _SIZES:
        for key in _names_of(name, config_class):
            value = fields.get(key)
            values = value if isinstance(value, list) else [value]  # of each layer
            for one in values:
                if one is not None and (type(one) is not int or one < 1):
                    raise ConfigError(f"config.json has {key}={one!r}; it has to be an int above 0")
                if name == "num_hidden_layers" and one is not None and one > _MOST_LAYERS:
                    raise ConfigError(
                        f"config.json has {key}={shown(one)}; pcg takes at most {_MOST_LAYERS}"
                    )


def check_finite(fields: Mapping[str, Any], within: str = "") -> None:
    """Refuse infinite numbers and NaN, which JSON does not have and Python reads.

    In lists they may stand: Mamba's `time_step_limit` ends in one.

    Raises:
        ConfigError: a field is such a number, also in an object as `rope_parameters`.
    """
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"config.json has {within}{key}={value}; it has to be finite")
        if isinstance(value, Mapping) and not within:
            check_finite(value, f"{key}.")


def check_named(fields: Mapping[str, Any], config: Any) -> None:
    """Refuse a configuration whose sizes would be transformers' defaults.

    Raises:
        ConfigError: the model's hidden size, heads or layers are not named.
    """
    missing = []
    for name in _NEEDED:
        names = _names_of(name, type(config))
        is_given = any(fields.get(key) is not None for key in names)
        is_derived = isinstance(getattr(type(config), name, None), property)
        if not (is_given or is_derived) and getattr(config, name, None) is not None:
            missing.append(names[0])
    if missing:
        raise ConfigError(
            f"config.json of this {config.model_type} names no {' and no '.join(missing)}, and the "
            "default of transformers would be another model's; add what is missing"
        )


def _names_of(name: str, config_class: Any) -> list[str]:
    """The names that a configuration may have for a size; first the one that its class has."""
    mapped = getattr(config_class, "attribute_map", {}).get(name, name)
    return list(dict.fromkeys((mapped, name, *_OTHER_NAMES.get(name, ()))))

"""Read a config.json by transformers, and refuse models that pcg does not compile.

The numbers of a configuration, which are its own: no size is a default of transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pcg.errors import ConfigError, TraceError, UnsupportedError
from pcg.trace.causes import ENCODER_DECODER, LENGTH_DEPENDENT_ROPE, MULTIMODAL
from pcg.units import shown

# ------------------------------------------------------------------------------------- config sizes


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


# ------------------------------------------------------------------------------------- model config


_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""`dynamic_rope_update` in transformers' modeling_rope_utils.py handles these by length."""


def parse_config(config: Mapping[str, Any]) -> Any:
    """The transformers configuration of the contents of a config.json.

    Raises:
        ConfigError: a size is missing, or a number or the dtype is none that a model can have.
        TraceError: transformers does not know or refuses it.
        UnsupportedError: pcg does not compile such a model; says why.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    fields = _decoded(dict(config))
    model_type = str(fields.pop("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise UnsupportedError(
                f"model_type {model_type!r} comes with code of its own (auto_map), which pcg does "
                "not run; use a model that transformers implements"
            )
        raise TraceError(f"transformers knows no model_type {model_type!r}; is it up to date?")
    check_sizes(fields, CONFIG_MAPPING[model_type])
    check_finite(fields)
    _check_dtype(fields)
    try:
        parsed = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise TraceError(
            f"transformers refuses the configuration of this {model_type}: {in_one_line(error)}"
        ) from error
    if not getattr(parsed, "is_encoder_decoder", False) and (
        type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise UnsupportedError(
            f"{model_type} is no causal LM in transformers; pcg compiles causal LMs"
        )
    _check_supported(parsed)
    check_named(fields, parsed)
    return parsed


def _decoded(value: Any) -> Any:
    """The fields of a config.json, which transformers writes with {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _check_dtype(fields: Mapping[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        value = fields.get(key)
        if value in (None, "auto"):
            continue
        found = getattr(torch, value.removeprefix("torch."), None) if type(value) is str else value
        if not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise ConfigError(
                f"config.json has {key}={shown(value)}; use a floating-point one, as 'bfloat16'"
            )


def positions_of(config: Any) -> int | None:
    """The number of positions of a transformers configuration; None where it names no bound."""
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions or getattr(config, "max_seq_len", None)
    return positions if type(positions) is int else None


def in_one_line(error: BaseException, first: bool = False) -> str:
    """Return an error's message as one line, or its first line alone; its type if it has none."""
    lines = [" ".join(line.split()) for line in str(error).strip().splitlines()]
    text = lines[0] if first and lines else " ".join(lines)
    return text or type(error).__name__


def check_module(model: nn.Module) -> None:
    """Refuse by name a module that would trace to another model than it is.

    Raises:
        UnsupportedError: says why, and what to give instead.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError("the model is wrapped by torch.compile; give model._orig_mod")
    if hasattr(model, "peft_config"):
        raise UnsupportedError(
            "the model is wrapped by peft already; give the base model, and its adapter by "
            "peft={name: directory}"
        )
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedError(
            f"{name} has no transformers configuration as model.config; give a causal LM, a "
            "transformers.PreTrainedModel"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{path} is a module of torch.jit, whose code cannot be traced; give the module "
                "that it was made of"
            )
        if type(module).__module__.startswith("torch.ao.nn."):
            raise UnsupportedError(
                f"{path} is quantized ({type(module).__module__}.{type(module).__name__}); give "
                "the model with unquantized weights"
            )
    _check_supported(config)


def _check_supported(config: Any) -> None:
    kind = config.model_type or type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{kind} is an {ENCODER_DECODER.name}; {ENCODER_DECODER.why}")
    text = config.get_text_config()
    if text is not config:
        raise UnsupportedError(
            f"{kind} is {MULTIMODAL.name}; {MULTIMODAL.why}, a {text.model_type}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise UnsupportedError(
            f"this {kind} is quantized (quantization_config={quantization}); use a checkpoint with "
            "unquantized weights"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"this {kind} has rope_type={rope_type!r}, {LENGTH_DEPENDENT_ROPE.name}; "
                f"{LENGTH_DEPENDENT_ROPE.why}"
            )


def _rope_types(parameters: object) -> set[str]:
    """The rope types that a configuration names, for all layers or for each type of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    own = parameters.get("rope_type")
    found = {str(own)} if own else set()
    return found.union(*map(_rope_types, parameters.values()))

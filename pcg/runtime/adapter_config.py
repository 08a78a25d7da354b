"""peft's LoRA configuration to a recipe, and back to adapter_config.json.

A field of peft's is one of four: the recipe's; a note that changes nothing here and is written back
as it was read; one that only matters with another one that is refused; or a feature that pcg does
not do, which is refused by name unless it is off. A field that is not known is the last.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.ir.recipe import LoraRecipe

Json = Mapping[str, Any]

# What LoraConfig.save_pretrained of peft 0.21.2 writes for a default configuration.
PEFT_DEFAULTS: Json = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": None,
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

# peft's field -> the recipe's.
RECIPE_FIELDS: Mapping[str, str] = {
    "alpha_pattern": "alpha_pattern",
    "bias": "bias",
    "exclude_modules": "exclude_modules",
    "init_lora_weights": "init",
    "layers_pattern": "layers_pattern",
    "layers_to_transform": "layers_to_transform",
    "lora_alpha": "alpha",
    "lora_bias": "lora_bias",
    "lora_dropout": "dropout",
    "r": "rank",
    "rank_pattern": "rank_pattern",
    "target_modules": "target_modules",
    "use_rslora": "use_rslora",
}

# fan_in_fan_out is how the base stores its weight: peft needs it to merge, we never merge.
NOTES = (
    "auto_mapping",
    "fan_in_fan_out",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)

# Without effect but with a feature that is refused, here in brackets.
INERT = (
    "megatron_core",  # megatron_config
    "qalora_group_size",  # use_qalora
    "runtime_config",  # use_dora
)

FEATURES: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "corda_config": "CorDA initialisation",
    "ensure_weight_tying": "tied adapters",
    "eva_config": "EVA initialisation",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "loftq_config": "LoftQ initialisation",
    "lora_ga_config": "LoRA-GA initialisation",
    "megatron_config": "Megatron layers",
    "modules_to_save": "whole modules trained beside LoRA",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "LoRA on parameters, such as fused experts",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "velora_config": "VeLoRA",
}

# Initialisations that leave the base as it is, so that what was saved is plain LoRA. The others
# (pissa, olora, corda, loftq, lora_ga) change the base's weights, which a file does not show.
PLAIN_INITS = ("eva", "gaussian", "mica", "orthogonal")


def recipe_from(config: object, *, saved: bool = False) -> LoraRecipe:
    """The recipe of a LoRA configuration.

    Args:
        config: "lora" (rank 16, alpha 32, all-linear), a `LoraRecipe`, a peft `LoraConfig`, or a
            mapping as in adapter_config.json.
        saved: it belongs to saved weights, so that how they were initialised matters only where
            that changed the base.
    Raises:
        UnsupportedError: another PEFT method, or a feature that pcg does not do, by name.
        AdapterError: not a configuration, or a value out of its range.
    """
    if isinstance(config, LoraRecipe):
        return config
    if isinstance(config, str):
        return _from_shorthand(config)
    fields = _fields(config)
    _check_method(fields)
    _check_features(fields, saved=saved)
    values: dict[str, Any] = {}
    for name, own_name in RECIPE_FIELDS.items():
        default = PEFT_DEFAULTS[name]
        value = fields.get(name, default)
        values[own_name] = default if value is None and default is not None else value
    for name in ("target_modules", "exclude_modules"):
        if not isinstance(values[name], str):
            values[name] = _names(name, values[name])
    if isinstance(values["layers_pattern"], str):
        values["layers_pattern"] = [values["layers_pattern"]] if values["layers_pattern"] else []
    values["layers_pattern"] = _names("layers_pattern", values["layers_pattern"])
    if type(values["layers_to_transform"]) is int:
        values["layers_to_transform"] = [values["layers_to_transform"]]
    if isinstance(values["layers_to_transform"], list):
        values["layers_to_transform"] = tuple(values["layers_to_transform"])
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(values[name], Mapping):
            raise AdapterError(f"{name}={values[name]!r}; use an object of regex to number")
        values[name] = dict(values[name])
    return LoraRecipe(**values)


def notes_of(config: Json) -> dict[str, Any]:
    """The fields of adapter_config.json that change nothing here."""
    return {name: config[name] for name in NOTES if name in config}


def config_fields(
    recipe: LoraRecipe, target_modules: Iterable[str] | str, base_model_name: str, notes: Json
) -> dict[str, Any]:
    """adapter_config.json as peft writes it.

    Args:
        recipe: the configuration.
        target_modules: names or a regex; peft writes no "all-linear" and no null.
        base_model_name: empty is null.
        notes: fields as of `notes_of`.
    """
    is_plain = isinstance(recipe.init, bool) or recipe.init.lower() == "gaussian"
    fields = {name: _to_json(getattr(recipe, own_name)) for name, own_name in RECIPE_FIELDS.items()}
    return {
        **PEFT_DEFAULTS,
        **{name: notes[name] for name in NOTES if name in notes},
        **fields,
        "target_modules": target_modules if isinstance(target_modules, str) else [*target_modules],
        # How trained weights began is history; peft would prepare for it again.
        "init_lora_weights": recipe.init if is_plain else True,
        "inference_mode": True,
        "base_model_name_or_path": base_model_name or None,
    }


def config_text(fields: Json) -> str:
    """JSON with sorted fields. The keys of the patterns stay in order: the first match counts."""
    return json.dumps(dict(sorted(fields.items())), indent=2)


def _to_json(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _from_shorthand(config: str) -> LoraRecipe:
    if config.lower() == "lora":
        return LoraRecipe.default()
    error: type[PcgError] = AdapterError if "/" in config or "." in config else UnsupportedError
    raise error(
        f'peft={config!r}: the one shorthand is "lora"; give a peft LoraConfig, or '
        "{name: directory of a saved adapter}"
    )


def _fields(config: object) -> dict[str, Any]:
    """The fields of a mapping or of a peft configuration."""
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    to_dict = getattr(config, "to_dict", None)
    if not hasattr(config, "peft_type") or not callable(to_dict):
        raise AdapterError(
            f"{type(config).__name__} is no PEFT configuration; give a peft LoraConfig, "
            'an object as in adapter_config.json, or "lora"'
        )
    if getattr(config, "_custom_modules", None):
        raise UnsupportedError("the LoraConfig registers custom modules, which pcg does not do")
    return dict(to_dict())


def _check_method(fields: Json) -> None:
    if "peft_type" not in fields:
        raise AdapterError(
            f'no "peft_type" among {", ".join(sorted(fields)) or "no fields"}; for LoRA add '
            '"peft_type": "LORA"'
        )
    method = fields["peft_type"]
    method = str(getattr(method, "value", method))
    if method != "LORA":
        raise UnsupportedError(f"peft_type={method}: pcg does LORA alone; train it as LoRA")
    task = fields.get("task_type")
    task = getattr(task, "value", task)
    if task not in (None, "", "CAUSAL_LM"):
        raise UnsupportedError(f"task_type={task}: pcg does CAUSAL_LM alone")


def _check_features(fields: Json, *, saved: bool) -> None:
    """Refuse what is on and is not ours."""
    ours = {*RECIPE_FIELDS, *NOTES, *INERT, "peft_type", "base_model_name_or_path"}
    init = fields.get("init_lora_weights", True)
    init = True if init is None else init
    if saved and init == "eva":
        ours.add("eva_config")
    for name, value in fields.items():
        if name in ours or value is None or value is False or value in ({}, [], (), "", set()):
            continue
        feature = f" ({FEATURES[name]})" if name in FEATURES else ", a field it does not know"
        raise UnsupportedError(
            f"the adapter's configuration has {name}={_short(value)}{feature}, which pcg does not "
            "do; train without it, or merge the adapter into its base with peft's merge_and_unload"
        )
    if not isinstance(init, bool | str):
        raise AdapterError(f'init_lora_weights={init!r}; use true, false or "gaussian"')
    allowed = PLAIN_INITS if saved else ("gaussian",)
    if isinstance(init, str) and init.lower() not in allowed:
        reason = (
            "it changed the base's weights, so that the adapter is none for the base as it was; "
            "save it from peft with path_initial_model_for_weight_conversion"
            if saved
            else 'pcg starts an adapter with true, false or "gaussian"; or let peft make and save '
            "one, and load that"
        )
        raise UnsupportedError(f"init_lora_weights={init!r}: {reason}")


def _names(name: str, value: object) -> tuple[str, ...] | None:
    """A list or set of names; a set has no order, so that it is sorted."""
    if value is None:
        return None
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise AdapterError(f"{name}={value!r}; use a list of names")
    return tuple(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""peft's configurations to recipes, and back to adapter_config.json."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.peft.adalora_config import ADALORA
from pcg.peft.bitfit_config import BITFIT
from pcg.peft.bottleneck_config import BOTTLENECK
from pcg.peft.config_format import NOTES, ConfigFormat, Json
from pcg.peft.ia3_config import IA3
from pcg.peft.lora_config import LORA
from pcg.peft.prompt_config import P_TUNING, PREFIX_TUNING, PROMPT_TUNING
from pcg.peft.registry import SHORTHANDS, Recipe, is_shorthand
from pcg.peft.targets import TargetRecipe
from pcg.peft.vera_config import VERA

FORMATS: Mapping[str, ConfigFormat] = {
    format_.recipe.peft_type: format_
    for format_ in (
        ADALORA,
        BITFIT,
        BOTTLENECK,
        IA3,
        LORA,
        P_TUNING,
        PREFIX_TUNING,
        PROMPT_TUNING,
        VERA,
    )
}


def recipe_from(config: object, *, saved: bool = False) -> Recipe:
    """The recipe of a configuration.

    Args:
        config: a word of `SHORTHANDS`, a recipe, a configuration of peft's, or a
            mapping as in adapter_config.json.
        saved: it belongs to saved weights, so that how they were initialised matters only where
            that changed the base.
    Raises:
        UnsupportedError: another PEFT method, or a feature that pcg does not do, by name.
        AdapterError: not a configuration, or a value out of its range.
    """
    if isinstance(config, TargetRecipe):
        return config
    if isinstance(config, str):
        return _from_shorthand(config)
    fields = _fields(config)
    return _format_of(fields).read(fields, saved=saved)


def notes_of(config: Json) -> dict[str, Any]:
    """The fields of adapter_config.json that change nothing here."""
    names = (*NOTES, *_format_of(config).notes)
    return {name: config[name] for name in names if name in config}


def config_fields(
    recipe: Recipe, target_modules: Iterable[str] | str, base_model_name: str, notes: Json
) -> dict[str, Any]:
    """adapter_config.json as peft writes it.

    Args:
        recipe: the configuration.
        target_modules: names or a regex; peft writes no "all-linear" and no null.
        base_model_name: empty is null.
        notes: fields as of `notes_of`.
    """
    format_ = FORMATS[recipe.peft_type]
    names = target_modules if isinstance(target_modules, str) else [*target_modules]
    return {
        **format_.defaults,
        **{name: notes[name] for name in (*NOTES, *format_.notes) if name in notes},
        **format_.written(recipe),
        **({"target_modules": names} if "target_modules" in format_.fields else {}),
        "inference_mode": True,
        "base_model_name_or_path": base_model_name or None,
    }


def config_text(fields: Json) -> str:
    """JSON with sorted fields. The keys of the patterns stay in order: the first match counts."""
    return json.dumps(dict(sorted(fields.items())), indent=2)


def _from_shorthand(config: str) -> Recipe:
    if is_shorthand(config):
        return SHORTHANDS[config.lower()]
    error: type[PcgError] = AdapterError if "/" in config or "." in config else UnsupportedError
    raise error(
        f"peft={config!r}: the shorthands are {', '.join(SHORTHANDS)}; give one, a configuration "
        "of peft's, or {name: directory of a saved adapter}"
    )


def _fields(config: object) -> dict[str, Any]:
    """The fields of a mapping or of a peft configuration."""
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    to_dict = getattr(config, "to_dict", None)
    if not hasattr(config, "peft_type") or not callable(to_dict):
        raise AdapterError(
            f"{type(config).__name__} is no PEFT configuration; give one of peft's, such as "
            'LoraConfig, an object as in adapter_config.json, or "lora"'
        )
    if getattr(config, "_custom_modules", None):
        raise UnsupportedError("the LoraConfig registers custom modules, which pcg does not do")
    return dict(to_dict())


def _format_of(fields: Json) -> ConfigFormat:
    if "peft_type" not in fields:
        raise AdapterError(
            f'no "peft_type" among {", ".join(sorted(fields)) or "no fields"}; for LoRA add '
            '"peft_type": "LORA"'
        )
    method = fields["peft_type"]
    method = str(getattr(method, "value", method))
    if method not in FORMATS:
        raise UnsupportedError(
            f"peft_type={method}: pcg does {', '.join(FORMATS)}; use one of them"
        )
    task = fields.get("task_type")
    task = getattr(task, "value", task)
    if task not in (None, "", "CAUSAL_LM"):
        raise UnsupportedError(f"task_type={task}: pcg does CAUSAL_LM alone")
    return FORMATS[method]

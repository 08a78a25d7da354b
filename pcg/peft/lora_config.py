"""LoRA in adapter_config.json."""

from __future__ import annotations

from typing import Any

from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.config_format import ConfigFormat, Json
from pcg.peft.lora import LoraRecipe
from pcg.peft.registry import Recipe

# Initialisations that leave the base as it is, so that what was saved is plain LoRA. The others
# (pissa, olora, corda, loftq, lora_ga) change the base's weights, which a file does not show.
PLAIN_INITS = ("eva", "gaussian", "mica", "orthogonal")


class LoraFormat(ConfigFormat):
    """LoRA's fields; how its weights begin matters where that changes the base."""

    def check(self, config: Json, *, saved: bool, allowed: tuple[str, ...] = ()) -> None:
        init = config.get("init_lora_weights", True)
        init = True if init is None else init
        if saved and init == "eva":
            allowed = (*allowed, "eva_config")
        super().check(config, saved=saved, allowed=allowed)
        _check_init(init, saved=saved)

    def written(self, recipe: Recipe) -> dict[str, Any]:
        assert isinstance(recipe, LoraRecipe)
        is_plain = isinstance(recipe.init, bool) or recipe.init.lower() == "gaussian"
        # How trained weights began is history; peft would prepare for it again.
        return super().written(recipe) | {"init_lora_weights": recipe.init if is_plain else True}


def _check_init(init: object, *, saved: bool) -> None:
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


LORA = LoraFormat(
    recipe=LoraRecipe,
    defaults={
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
    },
    fields={
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
        "use_dora": "use_dora",
        "use_rslora": "use_rslora",
    },
    inert=(
        "megatron_core",  # megatron_config
        "qalora_group_size",  # use_qalora
        "runtime_config",  # use_dora
    ),
    features={
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
        "use_qalora": "QA-LoRA",
        "velora_config": "VeLoRA",
    },
)

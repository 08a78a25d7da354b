"""AdaLoRA in adapter_config.json."""

from __future__ import annotations

from typing import Any

from pcg.peft.adalora import AdaLoraRecipe
from pcg.peft.config_format import ConfigFormat
from pcg.peft.lora_config import LORA
from pcg.peft.registry import Recipe


class AdaLoraFormat(ConfigFormat):
    """AdaLoRA's fields; peft reads no configuration without a schedule."""

    def written(self, recipe: Recipe) -> dict[str, Any]:
        assert isinstance(recipe, AdaLoraRecipe)
        steps = recipe.steps
        if steps is None:  # it was not trained yet: the shortest that peft takes
            steps = recipe.steps_before + recipe.steps_after + 1
        return super().written(recipe) | {"total_step": steps}


ADALORA = AdaLoraFormat(
    recipe=AdaLoraRecipe,
    defaults={
        **LORA.defaults,
        "beta1": 0.85,
        "beta2": 0.85,
        "deltaT": 1,
        "init_r": 12,
        "orth_reg_weight": 0.5,
        "peft_type": "ADALORA",
        "rank_pattern": None,
        "target_r": 8,
        "tfinal": 0,
        "tinit": 0,
        "total_step": None,
    },
    fields={
        "beta1": "beta1",
        "beta2": "beta2",
        "bias": "bias",
        "deltaT": "interval",
        "exclude_modules": "exclude_modules",
        "init_lora_weights": "init",
        "init_r": "rank",
        "layers_pattern": "layers_pattern",
        "layers_to_transform": "layers_to_transform",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "orth_reg_weight": "orthogonality",
        "rank_pattern": "kept",
        "target_modules": "target_modules",
        "target_r": "target_rank",
        "tfinal": "steps_after",
        "tinit": "steps_before",
        "total_step": "steps",
    },
    inert=LORA.inert,
    features={
        **LORA.features,
        "alpha_pattern": "alphas of modules",
        "lora_bias": "a bias on B",
        "use_dora": "DoRA",
        "use_rslora": "rank-stabilised scales",
    },
    notes=("r",),  # init_r is the rank; peft ignores this one
)

"""(IA)³ in adapter_config.json."""

from __future__ import annotations

from typing import Any

from pcg.peft.config_format import ConfigFormat
from pcg.peft.ia3 import Ia3Recipe
from pcg.peft.registry import Recipe


class Ia3Format(ConfigFormat):
    """(IA)³'s fields."""

    def written(self, recipe: Recipe) -> dict[str, Any]:
        assert isinstance(recipe, Ia3Recipe)
        targets, names = recipe.target_modules, recipe.feedforward_modules
        fields = super().written(recipe)
        if isinstance(targets, tuple) and isinstance(names, tuple) and not {*names} <= {*targets}:
            # peft writes paths for "all-linear", and then refuses names that are none of them.
            fields["feedforward_modules"] = [name for name in targets if name.endswith(names)]
        return fields


IA3 = Ia3Format(
    recipe=Ia3Recipe,
    defaults={
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "feedforward_modules": None,
        "inference_mode": True,
        "init_ia3_weights": True,
        "modules_to_save": None,
        "peft_type": "IA3",
        "peft_version": "0.21.2",
        "revision": None,
        "target_modules": None,
        "task_type": None,
    },
    fields={
        "exclude_modules": "exclude_modules",
        "feedforward_modules": "feedforward_modules",
        "init_ia3_weights": "init",
        "target_modules": "target_modules",
    },
    features={"modules_to_save": "whole modules trained beside (IA)³"},
)

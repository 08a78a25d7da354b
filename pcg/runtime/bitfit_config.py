"""BitFit in adapter_config.json, which peft does not know."""

from __future__ import annotations

from pcg.ir.bitfit_recipe import BitfitRecipe
from pcg.runtime.config_format import ConfigFormat

BITFIT = ConfigFormat(
    recipe=BitfitRecipe,
    defaults={"base_model_name_or_path": None, "inference_mode": True, "peft_type": "BITFIT"},
    fields={},
)

"""BitFit in adapter_config.json, which peft does not know."""

from __future__ import annotations

from pcg.peft.bitfit import BitfitRecipe
from pcg.peft.config_format import ConfigFormat

BITFIT = ConfigFormat(
    recipe=BitfitRecipe,
    defaults={"base_model_name_or_path": None, "inference_mode": True, "peft_type": "BITFIT"},
    fields={},
)

"""Bottleneck adapters in adapter_config.json, which peft does not know."""

from __future__ import annotations

from pcg.peft.bottleneck import BottleneckRecipe
from pcg.peft.config_format import ConfigFormat

BOTTLENECK = ConfigFormat(
    recipe=BottleneckRecipe,
    defaults={
        "base_model_name_or_path": None,
        "bottleneck_size": 64,
        "inference_mode": True,
        "non_linearity": "relu",
        "peft_type": "BOTTLENECK",
        "scaling": 1.0,
        "target_modules": None,
        "variant": "pfeiffer",
    },
    fields={
        "bottleneck_size": "size",
        "non_linearity": "non_linearity",
        "scaling": "scaling",
        "target_modules": "target_modules",
        "variant": "variant",
    },
)

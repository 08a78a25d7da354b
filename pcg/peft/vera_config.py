"""VeRA in adapter_config.json."""

from __future__ import annotations

from pcg.peft.config_format import ConfigFormat
from pcg.peft.vera import VeraRecipe

VERA = ConfigFormat(
    recipe=VeraRecipe,
    defaults={
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "bias": "none",
        "d_initial": 0.1,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "peft_type": "VERA",
        "peft_version": "0.21.2",
        "projection_prng_key": 0,
        "r": 256,
        "revision": None,
        "save_projection": True,
        "target_modules": None,
        "task_type": None,
        "vera_dropout": 0.0,
    },
    fields={
        "bias": "bias",
        "d_initial": "initial_d",
        "init_weights": "init",
        "layers_pattern": "layers_pattern",
        "layers_to_transform": "layers_to_transform",
        "projection_prng_key": "seed",
        "r": "rank",
        "save_projection": "saves_projection",
        "target_modules": "target_modules",
        "vera_dropout": "dropout",
    },
    features={"modules_to_save": "whole modules trained beside VeRA"},
)

"""Prompt tuning, P-tuning and prefix tuning in adapter_config.json."""

from __future__ import annotations

from pcg.peft.config_format import ConfigFormat
from pcg.peft.prefix import PrefixRecipe
from pcg.peft.prompt import PromptTuningRecipe, PTuningRecipe

# peft fills in the base's sizes where they are null.
_SIZES = ("num_attention_heads", "num_layers", "token_dim")

_DEFAULTS = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "modules_to_save": None,
    "num_attention_heads": None,
    "num_layers": None,
    "num_transformer_submodules": 1,
    "num_virtual_tokens": None,
    "peft_version": "0.21.2",
    "revision": None,
    "task_type": None,
    "token_dim": None,
}
_FIELDS = {"num_transformer_submodules": "submodules", "num_virtual_tokens": "tokens"}
_FEATURES = {"modules_to_save": "whole modules trained beside the prompt"}

PROMPT_TUNING = ConfigFormat(
    recipe=PromptTuningRecipe,
    defaults={
        **_DEFAULTS,
        "peft_type": "PROMPT_TUNING",
        "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": None,
        "tokenizer_kwargs": None,
        "tokenizer_name_or_path": None,
    },
    fields={**_FIELDS, "prompt_tuning_init": "init"},
    features=_FEATURES,
    notes=(*_SIZES, "prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path"),
)

P_TUNING = ConfigFormat(
    recipe=PTuningRecipe,
    defaults={
        **_DEFAULTS,
        "encoder_dropout": 0.0,
        "encoder_hidden_size": None,
        "encoder_num_layers": 2,
        "encoder_reparameterization_type": "MLP",
        "peft_type": "P_TUNING",
    },
    fields={
        **_FIELDS,
        "encoder_dropout": "encoder_dropout",
        "encoder_hidden_size": "hidden",
        "encoder_num_layers": "layers",
        "encoder_reparameterization_type": "kind",
    },
    features=_FEATURES,
    notes=_SIZES,
)

PREFIX_TUNING = ConfigFormat(
    recipe=PrefixRecipe,
    defaults={
        **_DEFAULTS,
        "encoder_hidden_size": None,
        "init_weights": None,
        "peft_type": "PREFIX_TUNING",
        "prefix_projection": False,
    },
    fields={
        **_FIELDS,
        "encoder_hidden_size": "hidden",
        "init_weights": "init",
        "num_layers": "layers",
        "prefix_projection": "projects",
    },
    features={"modules_to_save": "whole modules trained beside the prefix"},
    notes=("num_attention_heads", "token_dim"),
)

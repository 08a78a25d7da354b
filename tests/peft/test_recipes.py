"""Recipes from configurations of any form, and what is refused by name."""

from typing import Any

import peft
import pytest
import torch

from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import SHORTHANDS, recipe_from


def test_recipes_from_everything() -> None:
    assert recipe_from("lora") == SHORTHANDS["lora"]
    recipe = LoraConfig(r=3)
    assert recipe_from(recipe) is recipe
    assert recipe_from(peft.LoraConfig()) == LoraConfig()
    assert recipe_from({"peft_type": "LORA", "rank_pattern": None}) == LoraConfig()
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["b", "a"], exclude_modules="x.*", use_rslora=True,
        bias="all", lora_dropout=0.25, layers_to_transform=3, layers_pattern="h",
        rank_pattern={"a": 2}, alpha_pattern={"b": 3}, lora_bias=True, init_lora_weights=False,
        task_type="CAUSAL_LM", revision="main", qalora_group_size=8,
    )  # fmt: skip
    expected = LoraConfig(
        r=4, lora_alpha=7, target_modules=("a", "b"), exclude_modules="x.*", use_rslora=True,
        bias="all", lora_dropout=0.25, layers_to_transform=(3,), layers_pattern=("h",),
        rank_pattern={"a": 2}, alpha_pattern={"b": 3}, lora_bias=True, init_lora_weights=False,
    )  # fmt: skip
    assert recipe_from(config) == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"trainable_token_indices": [0]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"eva_config": {"rho": 2}}, "eva_config"),
        ({"loftq_config": {"bits": 4}}, "loftq_config"),
        ({"use_bdlora": {"x": 1}}, "use_bdlora"),
        ({"a_field_of_tomorrow": 0}, "a_field_of_tomorrow=0, a field it does not know"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"init_lora_weights": "eva"}, "'eva'"),
        ({"init_lora_weights": "loftq"}, "'loftq'"),
        ({"peft_type": "IA3", "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3", "r": 8}, "r=8, a field it does not know"),
        ({"peft_type": "OFT"}, "peft_type=OFT"),
        ({"task_type": "TOKEN_CLS"}, "task_type=TOKEN_CLS"),
    ],
)
def test_features_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        recipe_from({"peft_type": "LORA", **fields})


def test_features_of_config_objects_refused_by_name() -> None:
    for config, name in [
        (peft.LoraConfig(use_qalora=True), "QA-LoRA"),
        (peft.OFTConfig(), "OFT"),
        (peft.LoKrConfig(), "LOKR"),
    ]:
        with pytest.raises(UnsupportedError, match=name):
            recipe_from(config)
    custom = peft.LoraConfig()
    custom._register_custom_module({torch.nn.Linear: torch.nn.Linear})
    with pytest.raises(UnsupportedError, match="custom modules"):
        recipe_from(custom)


def test_saved_initialisations() -> None:
    """What left the base as it was is plain LoRA once it is saved; what changed the base is not."""
    for init in ("eva", "orthogonal", "mica", "gaussian"):
        assert (
            recipe_from(
                {"peft_type": "LORA", "init_lora_weights": init}, saved=True
            ).init_lora_weights
            == init
        )
    for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"):
        with pytest.raises(UnsupportedError, match="changed the base"):
            recipe_from({"peft_type": "LORA", "init_lora_weights": init}, saved=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 8}, 'no "peft_type"'),
        (5, "int is no PEFT configuration"),
        ("path/to/adapter", "the shorthands are"),
        ({"peft_type": "LORA", "r": "8"}, "r='8'"),
        ({"peft_type": "LORA", "target_modules": 3}, "target_modules=3"),
        ({"peft_type": "LORA", "rank_pattern": [1]}, "rank_pattern"),
        ({"peft_type": "LORA", "init_lora_weights": 3}, "init_lora_weights=3"),
        ({"peft_type": "LORA", "layers_to_transform": "1"}, "layers_to_transform"),
    ],
)
def test_not_configurations(config: object, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        recipe_from(config)
    with pytest.raises(UnsupportedError, match="'lokr'"):
        recipe_from("lokr")

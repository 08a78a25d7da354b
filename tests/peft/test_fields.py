"""Fields of recipes: peft's defaults, what is refused by name, and what explain counts."""

from __future__ import annotations

from typing import Any

import peft
import pytest
from peft.utils import constants

import pcg
import pcg.compiler as compiler
from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.ir.module_paths import matches_end
from pcg.peft.ia3 import FAMILY_FEEDFORWARD, Ia3Bypass, IA3Config
from pcg.peft.lora import LoraConfig
from pcg.peft.prompt_encoder import PromptEncoder
from pcg.peft.registry import RECIPES, recipe_from
from pcg.peft.targets import FAMILY_TARGETS
from tests.support import oracle
from tests.support.adalora import FIELDS as ADALORA
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, trained

COMPLETE: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    "ADALORA": ADALORA,
    "LOHA": {"r": 3, "alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "VERA": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    "IA3": {},
    "PROMPT_TUNING": {"num_virtual_tokens": 5},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_reparameterization_type": "LSTM",
                 "encoder_hidden_size": 24},
    "BITFIT": {},
    "BOTTLENECK": {"bottleneck_size": 4},
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], type[PcgError], str]] = [
    *((kind, {"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save")
      for kind in COMPLETE if kind not in ("LORA", "BITFIT", "BOTTLENECK")),
    ("LORA", {"modules_to_save": "lm_head"}, AdapterError, "modules_to_save='lm_head'"),
    *((kind, {"r": 8}, UnsupportedError, "r=8, a field it does not know")
      for kind in ("IA3", "PROMPT_TUNING", "BITFIT", "BOTTLENECK")),
    *((kind, {"num_virtual_tokens": None}, AdapterError, "num_virtual_tokens=None")
      for kind in ("PROMPT_TUNING", "PREFIX_TUNING")),
    *((kind, {"num_transformer_submodules": 2}, AdapterError, "num_transformer_submodules=2")
      for kind in ("PROMPT_TUNING", "PREFIX_TUNING")),
    ("ADALORA", {"init_r": 0}, AdapterError, "init_r=0"),
    ("ADALORA", {"deltaT": 0}, AdapterError, "deltaT=0"),
    ("ADALORA", {"total_step": 5}, AdapterError, "leave no step"),
    ("ADALORA", {"lora_alpha": 0}, AdapterError, "lora_alpha=0"),
    ("ADALORA", {"beta1": 1.0}, AdapterError, "beta1=1"),
    ("ADALORA", {"orth_reg_weight": -1.0}, AdapterError, "orth_reg_weight=-1"),
    ("ADALORA", {"init_lora_weights": "gaussian"}, AdapterError, "init_lora_weights='gaussian'"),
    ("ADALORA", {"rank_pattern": {"q_proj.lora_E": [True]}}, AdapterError, "rank_pattern has 1 of"),
    ("ADALORA", {"rank_pattern": {"q_proj": [True] * 4}}, AdapterError, "rank_pattern has 4 of"),
    ("ADALORA", {"use_dora": True}, UnsupportedError, "DoRA"),
    ("LOHA", {"r": 0}, AdapterError, "r=0"),
    ("LOHA", {"alpha": "8"}, AdapterError, "alpha='8'"),
    ("LOHA", {"rank_pattern": {"q_proj": 0}}, AdapterError, r"rank_pattern\['q_proj'\]=0"),
    ("LOHA", {"rank_dropout": 2.0}, AdapterError, "rank_dropout=2"),
    ("LOHA", {"init_weights": "gaussian"}, AdapterError, "init_weights='gaussian'"),
    ("LOHA", {"bias": "all"}, UnsupportedError, "bias='all', a field it does not know"),
    ("LORA", {"use_dora": True, "lora_bias": True}, AdapterError, "does not go with use_dora=True"),
    ("VERA", {"r": 0}, AdapterError, "r=0"),
    ("VERA", {"projection_prng_key": -1}, AdapterError, "projection_prng_key=-1"),
    ("VERA", {"d_initial": "x"}, AdapterError, "d_initial='x'"),
    ("VERA", {"init_weights": 1}, AdapterError, "init_weights=1"),
    ("IA3", {"feedforward_modules": "("}, AdapterError, "not a regex"),
    ("IA3", {"init_ia3_weights": 1}, AdapterError, "init_ia3_weights=1"),
    ("PROMPT_TUNING", {"num_virtual_tokens": 0}, AdapterError, "num_virtual_tokens=0"),
    ("PROMPT_TUNING", {"prompt_tuning_init": "ZERO"}, AdapterError, "prompt_tuning_init='ZERO'"),
    ("PROMPT_TUNING", {"task_type": "TOKEN_CLS"}, UnsupportedError, "TOKEN_CLS"),
    ("PREFIX_TUNING", {"num_layers": 0}, AdapterError, "num_layers=0"),
    ("PREFIX_TUNING", {"init_weights": "ones"}, AdapterError, "init_weights='ones'"),
    ("PREFIX_TUNING", {"prefix_projection": 1}, AdapterError, "prefix_projection=1"),
    ("PREFIX_TUNING", {"encoder_hidden_size": 0}, AdapterError, "encoder_hidden_size=0"),
    ("P_TUNING", {"encoder_reparameterization_type": "GRU"}, AdapterError, "type='GRU'"),
    ("P_TUNING", {"encoder_hidden_size": 0}, AdapterError, "encoder_hidden_size=0"),
    ("P_TUNING", {"encoder_num_layers": True}, AdapterError, "encoder_num_layers=True"),
    ("P_TUNING", {"encoder_dropout": 2.0}, AdapterError, "encoder_dropout=2.0"),
    ("BOTTLENECK", {"variant": "compacter"}, AdapterError, "use one of houlsby, parallel, pfeiff"),
    ("BOTTLENECK", {"non_linearity": "swish"}, AdapterError, "'swish'; use one of gelu"),
    ("BOTTLENECK", {"bottleneck_size": 0}, AdapterError, "bottleneck_size=0"),
    ("BOTTLENECK", {"scaling": float("nan")}, AdapterError, "scaling=nan"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "error", "message"), REFUSED, ids=[f"{k}-{m}" for k, _, _, m in REFUSED]
)
def test_fields_are_refused_by_name(
    kind: str, fields: dict[str, Any], error: type[PcgError], message: str
) -> None:
    with pytest.raises(error, match=message):
        recipe_from({"peft_type": kind, **COMPLETE[kind], **fields})


def test_recipes_that_fit_no_module() -> None:
    with pytest.raises(AdapterError, match=r"feedforward_modules has 'down'.*did you mean"):
        IA3Config(target_modules=("downs",), feedforward_modules=("down",)).bypasses(("a.downs",))
    with pytest.raises(AdapterError, match=r"feedforward_modules='.*_proj', a regex for the whole"):
        IA3Config(target_modules=("q",), feedforward_modules=r".*_proj").bypasses(("a.q",))
    with pytest.raises(AdapterError, match=r"target_modules is not given.*'mystery'"):
        IA3Config().bypasses(("a.q",), model_type="mystery")
    with pytest.raises(AdapterError, match=r"feedforward_modules is not given.*'mystery'"):
        IA3Config(target_modules=("q",)).bypasses(("a.q",), model_type="mystery")
    with pytest.raises(AdapterError, match="prefix_projection=True makes keys and values of 8"):
        PromptEncoder("PREFIX", 3).widths([(4, 8)])
    config = BY_NAME["llama3"].config(2)
    recipe = {"peft_type": "BOTTLENECK", "variant": "parallel", "target_modules": ["o_proj"]}
    with pytest.raises(UnsupportedError, match=r"self_attn\.o_proj ends no MLP"):
        compiler.compile_program(config, {**COMPLETE["BOTTLENECK"], **recipe})


def test_a_feedforward_name_matches_the_end_of_any_path_as_in_peft() -> None:
    recipe = IA3Config(target_modules=("q_proj", "up_proj"), feedforward_modules=("p_proj",))
    found = recipe.bypasses(("a.q_proj", "a.up_proj"))
    assert found == {"a.q_proj": Ia3Bypass(False), "a.up_proj": Ia3Bypass(True)}
    assert matches_end("q_proj", "a.q_proj")


@pytest.mark.parametrize("kind", ["LORA", "ADALORA", "LOHA", "VERA", "IA3"])
def test_defaults_of_families_are_pefts(kind: str) -> None:
    def of(name: str) -> dict[str, list[str]]:
        name = f"TRANSFORMERS_MODELS_TO_{name}_MODULES_MAPPING"
        # w2: parameters of transformers 5, and no linear modules.
        return {k: [n for n in v if n != "w2"] for k, v in getattr(constants, name).items()}

    ours: Any = RECIPES[kind].family_targets  # type: ignore[attr-defined]
    assert {k: list(v) for k, v in ours.items()} == {k: of(f"{kind}_TARGET")[k] for k in ours}
    if kind == "IA3":
        assert ours.keys() == of("IA3_TARGET").keys() & FAMILY_TARGETS.keys()
        inputs = {k: list(v) for k, v in FAMILY_FEEDFORWARD.items()}
        assert inputs == {k: of("IA3_FEEDFORWARD")[k] for k in ours}


@pytest.mark.parametrize(
    "config", [peft.LoraConfig, peft.IA3Config, peft.VeraConfig, peft.LoHaConfig]
)
def test_config_fields_are_those_of_the_installed_peft(config: Any) -> None:
    theirs = config(inference_mode=True).to_dict()
    theirs["peft_type"] = theirs["peft_type"].value
    ours = RECIPES[theirs["peft_type"]]().config_fields(None, "", {})
    assert {**ours, "peft_version": theirs["peft_version"]} == theirs


COUNTED: list[tuple[peft.PeftConfig, str]] = [
    (peft.LoHaConfig(**COMPLETE["LOHA"]), "LoHa r3 on down_proj, q_proj"),
    (peft.AdaLoraConfig(**ADALORA), "AdaLoRA r4 on down_proj, q_proj"),
    (
        peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
        "prompt tuning with 5 virtual tokens",
    ),
    (
        peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
        "prefix tuning with 4 virtual tokens",
    ),
    (peft.PromptEncoderConfig(**COMPLETE["P_TUNING"], **CAUSAL), ""),
]


@pytest.mark.parametrize(("config", "text"), COUNTED, ids=[c.peft_type.value for c, _ in COUNTED])
def test_explain_counts_what_peft_trains(config: peft.PeftConfig, text: str) -> None:
    fields = BY_NAME["llama3"].config(2)
    wrapped = peft.get_peft_model(oracle.random_model(fields), config)
    count = sum(p.numel() for p in trained(wrapped).values())
    report = pcg.explain(fields, config, batch=1, seq=16)
    assert report.parameters["trainable"] == count
    assert text in report.peft
    assert {"eager", "compressed"} <= {stage.stage for stage in report.activations}
    if config.peft_type == "LOHA":
        # In fp32: the factors, their gradients, and AdamW's two moments and a step of each.
        assert report.memory_bytes["adapters"] == report.memory_bytes["gradients"] == 4 * count
        assert report.memory_bytes["optimizer"] == 8 * count + 4 * 4 * 4


def test_the_default_of_lora_is_pefts() -> None:
    config, recipe = peft.LoraConfig(), LoraConfig()
    assert recipe_from(config) == recipe
    theirs = (config.r, config.lora_alpha, config.lora_dropout)
    assert (recipe.r, recipe.lora_alpha, recipe.lora_dropout) == theirs == (8, 8, 0.0)

"""Recipes against peft itself: the same modules, ranks and scales."""

import warnings
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.pytorch_utils import Conv1D

from pcg.errors import AdapterError
from pcg.peft.lora import LoraBypass, LoraConfig

SMALL = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "pad_token_id": None}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, num_hidden_layers=12, num_attention_heads=2),
    "qwen2": transformers.Qwen2Config(
        **SMALL, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=3, vocab_size=32, bos_token_id=0, eos_token_id=0
    ),
    "opt": transformers.OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        word_embed_proj_dim=16,
    ),
    "gpt_neox": transformers.GPTNeoXConfig(
        **SMALL, num_hidden_layers=2, num_attention_heads=2
    ),
    "falcon": transformers.FalconConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    ),
}  # fmt: skip


def meta_model(model_type: str) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type])


def linear_modules(model: torch.nn.Module) -> tuple[list[str], str]:
    """Paths of the linear modules, and of the head."""
    head = model.get_output_embeddings()
    paths = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    return paths, next(n for n, m in model.named_modules() if m is head)


def peft_sites(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, LoraBypass]:
    """Module, rank and scale as peft sets them up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = peft.get_peft_model(model, peft.LoraConfig(**config))
    return {
        name: LoraBypass(module.r["default"], module.scaling["default"])
        for name, module in tuned.base_model.model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def to_recipe(config: dict[str, Any]) -> LoraConfig:
    return LoraConfig(**config)


def assert_as_peft(model_type: str, config: dict[str, Any]) -> dict[str, LoraBypass]:
    model = meta_model(model_type)
    paths, head = linear_modules(model)
    ours = to_recipe(config).bypasses(paths, head, model_type)
    assert ours == peft_sites(model, config)
    return ours


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": "All-Linear", "r": 4, "lora_alpha": 3, "use_rslora": True},
        {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
        {"target_modules": "all-linear", "rank_pattern": {r".*\.0\..*": 3}},
    ],
)
def test_every_family(model_type: str, config: dict[str, Any]) -> None:
    assert assert_as_peft(model_type, config)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, 24),
        ({"target_modules": ["1.self_attn.q_proj"]}, 1),
        ({"target_modules": r"model\.layers\.[0-3]\.mlp\..*_proj"}, 12),
        ({"target_modules": ["down_proj"], "layers_to_transform": [0, 11]}, 2),
        ({"target_modules": ["down_proj"], "layers_to_transform": []}, 12),
        ({"target_modules": ["down_proj", "model.layers.5.mlp.down_proj"],
          "layers_to_transform": [2]}, 2),
        ({"target_modules": ["down_proj"], "layers_to_transform": [4],
          "layers_pattern": "layers"}, 1),
        ({"target_modules": ["down_proj"], "layers_to_transform": [4],
          "layers_pattern": ["h", "layers"]}, 1),
        ({"target_modules": ["q_proj", "k_proj"], "r": 16, "lora_alpha": 8,
          "rank_pattern": {"k_proj": 4, r"layers\.1\..*": 2},
          "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 64, "k_proj": 5}}, 24),
        ({"target_modules": ["q_proj"], "lora_alpha": 0.5, "r": 3, "use_rslora": True}, 12),
    ],
)  # fmt: skip
def test_llama(config: dict[str, Any], count: int) -> None:
    model = meta_model("llama")
    paths, head = linear_modules(model)
    sites = to_recipe(config).bypasses(paths, head)
    assert sites == peft_sites(model, config)
    assert len(sites) == count


NAMES = ["q_proj", "o_proj", "self_attn.k_proj", "mlp.up_proj", "down_proj", "lm_head"]
NAMES += ["model.layers.1.mlp.gate_proj", "0.self_attn.v_proj", "1.self_attn.v_proj"]
PATTERNS = [
    "q_proj",
    "self_attn.*",
    r"layers\.1\..*",
    r".*\.1\..*",
    "up_proj|down_proj",
    "^model.*",
]


@settings(max_examples=25)
@given(
    targets=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
    | st.sampled_from(["all-linear", r".*_proj", r".*\.1\..*proj", r"(model|x)\..*mlp\..*proj"]),
    exclude=st.none() | st.lists(st.sampled_from(NAMES), max_size=3) | st.sampled_from(PATTERNS),
    layers=st.none() | st.lists(st.integers(0, 11), max_size=3, unique=True),
    ranks=st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 9), max_size=3),
    alphas=st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 64), max_size=3),
    rslora=st.booleans(),
)
def test_random_recipes(
    targets: Any, exclude: Any, layers: Any, ranks: Any, alphas: Any, rslora: bool
) -> None:
    config = {
        "target_modules": targets, "exclude_modules": exclude, "rank_pattern": ranks,
        "alpha_pattern": alphas, "use_rslora": rslora,
        "layers_to_transform": None if isinstance(targets, str) else layers,
    }  # fmt: skip
    model = meta_model("llama")
    paths, head = linear_modules(model)
    try:
        sites = to_recipe(config).bypasses(paths, head)
    except AdapterError as error:  # stricter than peft, but for what is left without a module
        if "leave none" in str(error):
            with pytest.raises(ValueError, match=r"(?i)modules"):
                peft_sites(model, config)
        assume(False)
    assert sites == peft_sites(model, config)


def test_recipes_are_values() -> None:
    assert hash(LoraConfig(rank_pattern={"a": 2})) == hash(LoraConfig(rank_pattern={"a": 2}))
    assert LoraConfig(rank_pattern={"a": 2}) != LoraConfig()


PATHS = [f"model.layers.{i}.{m}" for i in range(3) for m in ("attn.q_proj", "mlp.up", "mlp.0")]
PATHS += ["lm_head"]


def test_resolved_names_mean_the_same_modules() -> None:
    short = LoraConfig(target_modules="all-linear", exclude_modules=r".*\.0")
    assert short.resolved(PATHS, "lm_head").target_modules == ("q_proj", "up")
    # `.0` would be every first layer, too.
    numbers = LoraConfig(target_modules="all-linear").resolved(PATHS, "lm_head")
    assert numbers.target_modules == tuple(PATHS[:-1])
    shared = LoraConfig(target_modules="all-linear").resolved(["a.out", "out"], "out")
    assert shared.target_modules == ("a.out",)
    assert LoraConfig().resolved(PATHS, None, "llama").target_modules == ("q_proj", "v_proj")
    regex = LoraConfig(target_modules=r".*up")
    assert regex.resolved(PATHS) is regex


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ("q_prj",)}, "'q_prj', which .* named; did you mean q_proj"),
        ({"target_modules": ("q_proj", "fc1")}, "the names are 0, lm_head, q_proj, up"),
        ({"target_modules": "q_proj"}, "a regex for the whole path, matches none of the 10"),
        ({"target_modules": ()}, "leave none of the 10"),
        ({"target_modules": ("up",), "exclude_modules": ("up",)}, "leave none"),
        ({"target_modules": ("up",), "layers_to_transform": (1, 7)}, "has 7, .* in layers 0, 1, 2"),
        ({"target_modules": ("up",), "layers_to_transform": (1,),
          "layers_pattern": ("h",)}, "leave none"),
        ({"target_modules": ("up",), "rank_pattern": {"q_proj": 2}}, "rank_pattern has 'q_proj'"),
        ({"target_modules": ("up",), "alpha_pattern": {"upp": 2}}, "did you mean up"),
        ({}, "no modules are usual for model_type='opus'"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        LoraConfig(**changes).bypasses(PATHS, "lm_head", "opus")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"r": 8.0}, "r=8.0"),
        ({"rank_pattern": {"q": 0}}, r"rank_pattern\['q'\]=0"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"lora_alpha": "16"}, "lora_alpha='16'"),
        ({"alpha_pattern": {"q": None}}, "alpha_pattern"),
        ({"bias": "some"}, "none, all, lora_only"),
        ({"lora_dropout": 1.5}, "lora_dropout=1.5"),
        ({"use_rslora": 1}, "use_rslora=1"),
        ({"init_lora_weights": None}, "init_lora_weights=None"),
        ({"init_lora_weights": "gaussian", "lora_bias": True}, "lora_bias goes with"),
        ({"target_modules": [1]}, "use a list of names"),
        ({"target_modules": ("",)}, "not empty"),
        ({"target_modules": "(q"}, "not a regex"),
        ({"exclude_modules": "(q"}, "not a regex"),
        ({"rank_pattern": {"(": 1}}, "not a regex"),
        ({"target_modules": ".*q", "layers_to_transform": (1,)}, "does not go with"),
        ({"target_modules": "all-linear", "layers_to_transform": (1,)}, "does not go with"),
        ({"target_modules": ("q",), "layers_pattern": ("h",)}, "needs layers_to_transform"),
        ({"target_modules": ("q",), "layers_to_transform": (-1,)}, "layer indices"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        LoraConfig(**changes)

"""What pcg does not trace is refused by name, and mixtures of experts trace without running."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import nn

import pcg
import pcg.compiler as compiler
from pcg.errors import AdapterError, ConfigError, PcgError, TraceError, UnsupportedError
from pcg.ir.program.program import ModelGraph
from pcg.passes.pipeline import Settings, pipeline
from tests.support.architectures import default_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
MIXTRAL = {**EXPERTS, "model_type": "mixtral", "num_local_experts": 4}
QWEN3_MOE = {**EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
REFUSED: dict[str, tuple[dict[str, Any], type[PcgError], str]] = {
    "dynamic rope": (
        {**SMALL, "model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        UnsupportedError,
        r"this llama has rope_type='dynamic'",
    ),
    "dynamic rope of one type of layer": (
        {
            **SMALL,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
            },
        },
        UnsupportedError,
        r"this gemma3_text has rope_type='dynamic'",
    ),
    "encoder-decoder": (
        {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
        UnsupportedError,
        r"t5 is an encoder-decoder",
    ),
    "encoder-decoder with a causal LM": (
        {"model_type": "bart", "d_model": 64, "vocab_size": 128},
        UnsupportedError,
        r"bart is an encoder-decoder",
    ),
    "no language model": ({"model_type": "vit"}, UnsupportedError, r"vit is no causal LM"),
    "more than a language model": (
        {"model_type": "paligemma", "text_config": {**SMALL, "head_dim": 16}},
        UnsupportedError,
        r"paligemma is no causal LM",
    ),
    "attention to later tokens": (
        {**SMALL, "model_type": "bert"},
        TraceError,
        r"BertSelfAttention attends to later tokens",
    ),
    "unknown": (
        {**SMALL, "model_type": "lama"},
        TraceError,
        r"transformers knows no model_type 'lama'",
    ),
    "code of its own": (
        {**SMALL, "model_type": "lama", "auto_map": {"AutoModelForCausalLM": "modeling_lama.Lama"}},
        UnsupportedError,
        r"'lama' comes with code of its own \(auto_map\)",
    ),
    "quantized": (
        {**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "hqq"}},
        UnsupportedError,
        r"quantized by hqq .*use one of",
    ),
    "bad configuration": (
        {**SMALL, "model_type": "llama", "num_attention_heads": 5},
        PcgError,
        r"llama",
    ),
    "recurrence": (
        {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128},
        UnsupportedError,
        r"rwkv: another recurrence \(.*; .*0.attention \(RwkvSelfAttention\) runs .* in a loop",
    ),
    "attention to chosen tokens": (
        default_config("deepseek_v4"),
        UnsupportedError,
        r"deepseek_v4: sparse attention \(.*; .*DeepseekV4CSACompressor\) runs aten.slice",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    config, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as refused:
        compiler.compile_program(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
def test_a_size_that_is_not_named_is_no_default(name: str) -> None:
    config = {key: value for key, value in SMALL.items() if key != name}
    with pytest.raises(ConfigError, match=f"this llama names no {name}, and the default"):
        compiler.trace({**config, "model_type": "llama"})


def test_a_size_has_the_name_that_its_architecture_has() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 128}
    with pytest.raises(ConfigError, match="this gpt2 names no n_layer"):
        compiler.trace(config)
    assert compiler.trace({**config, "n_layer": 3}).schedule == (0, 0, 0)
    assert compiler.trace({**config, "num_hidden_layers": 2}).schedule == (0, 0)
    bloom = {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
    assert compiler.trace(bloom).schedule == (0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("num_hidden_layers", -1),
        ("vocab_size", "64"),
        ("head_dim", 64.5),
        ("num_key_value_heads", True),
    ],
)
def test_a_size_that_no_model_has_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}; it has to be an int above 0"):
        compiler.trace({**SMALL, "model_type": "llama", name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; it has to be finite"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf; it has to be finite"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "rope_parameters.rope_theta=inf; it has to be finite",
        ),
        ({"dtype": "int8"}, "dtype='int8'; use a floating-point one"),
        ({"torch_dtype": [1]}, r"torch_dtype=\[1\]; use a floating-point one"),
        ({"dtype": "load"}, "dtype='load'; use a floating-point one"),
    ],
)
def test_a_number_or_dtype_that_no_model_has_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compiler.trace({**SMALL, "model_type": "llama", **fields})


@pytest.mark.parametrize("layers", [1025, 10**9, 10**100])
def test_more_layers_than_any_model_has_are_refused(layers: int) -> None:
    """Each would be built before anything is known of it."""
    with pytest.raises(ConfigError, match=r"num_hidden_layers=.*pcg takes at most 1024"):
        compiler.trace({**SMALL, "model_type": "llama", "num_hidden_layers": layers})


@pytest.mark.parametrize("peft", ["bitfit", {"a": "lora", "b": "bitfit"}])
def test_bitfit_needs_biases(peft: object) -> None:
    config = {**SMALL, "model_type": "llama"}
    message = "BitFit trains nothing of this llama, which has no biases; use LoRA"
    with pytest.raises(AdapterError, match=message):
        pcg.explain(config, peft, gpus=["A100-40"])
    with pytest.raises(AdapterError, match=message):
        compiler.compile_program(config, peft)


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.Sequential(), nn.Module()])
def test_a_plain_module_is_refused(module: nn.Module) -> None:
    with pytest.raises(
        UnsupportedError, match=r"has no transformers configuration as model\.config"
    ):
        pcg.explain(module)


def test_code_of_its_own_is_not_needed_where_transformers_has_the_model() -> None:
    """Many checkpoints of known types still name the code that they first came with."""
    config = {**SMALL, "model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling.X"}}
    assert compiler.trace(config).schedule == (0, 0)


def test_numbers_of_a_configuration_and_a_recipe_may_be_ints() -> None:
    """JSON has 1 for 1.0, and attributes of operators are floats."""
    numbers = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    granite = {**EXPERTS, "model_type": "granite", **dict.fromkeys(numbers, 1)}
    recipe = pcg.LoraConfig(r=2, target_modules=("q_proj",), lora_dropout=1)
    program = compiler.compile_program(granite, {"mine": recipe})
    (attention,) = (n for n in program.base.blocks[0].nodes if n.op == "attention")
    assert isinstance(attention.attribute("scale"), float)


# -------------------------------------------------------------------------- mixtures of experts


def raised(config: dict[str, Any]) -> ModelGraph:
    return pipeline(Settings()).base(config).model


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_experts_trace_fold_and_raise(config: dict[str, Any]) -> None:
    model = raised({**config, "num_hidden_layers": 6})
    assert model.layers == (0,) * 6
    (block,) = model.blocks
    counts = Counter(node.op for node in block.nodes)
    assert {site.rpartition(".")[2] for site in model.linear_sites()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "lm_head",
        "gate:weight:1",
        "experts:gate_up_proj:4",
        "experts:down_proj:4",
    }
    assert counts["rms_norm"] == (2 if config is MIXTRAL else 4)
    assert (counts["expert_linear"], counts["topk"], counts["softmax"]) == (2, 1, 1)
    assert (counts["rope"], counts["attention"]) == (2, 1)
    assert not counts.keys() & {"rsqrt", "pow", "mean", "neg", "concat"}


def test_layers_with_and_without_experts_are_two_blocks() -> None:
    model = raised({**QWEN3_MOE, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]})
    assert model.layers == (0, 1, 0, 1)
    has_experts = ["expert_linear" in {node.op for node in block.nodes} for block in model.blocks]
    assert has_experts == [False, True]
    gates = [path for path in model.linear_modules() if path.endswith("gate_proj")]
    assert gates == ["model.layers.0.mlp.gate_proj", "model.layers.2.mlp.gate_proj"]

"""The shipped configs build the models they name, parameter for parameter.

The counts are what the publishers give. On top, those known to the last digit: the hub's count of
the checkpoint's tensors (for Falcon, whose checkpoint holds the tied head twice, less the second
copy). Below, those published rounded only: the digits follow from the published shape (layers,
width, heads, vocabulary), and `PUBLISHED_BILLIONS` is what the model card or paper says.
"""

import dataclasses
import json

import pytest
import torch
import transformers
from transformers import AutoConfig

from pcg import source

PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "LiquidAI/LFM2-8B-A1B": 8_339_929_856,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    # As published, less the layer that predicts further tokens, and 3,840 numbers stored in fp32.
    "Qwen/Qwen3.5-9B": 9_653_108_208 - 243_290_624 - 3_840,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "allenai/Olmo-3-7B-Instruct": 7_298_011_136,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21_825_437_888,
    "bigcode/starcoder": 15_517_456_384,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,  # less the routers' buffers
    "facebook/opt-6.7b": 6_658_473_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-27b-it": 27_432_406_640,
    "google/gemma-3-4b-it": 4_300_079_472,
    "huggyllama/llama-13b": 13_015_864_320,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "huggyllama/llama-7b": 6_738_415_616,
    "ibm-granite/granite-4.0-h-tiny": 6_939_037_248,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "microsoft/phi-4": 14_659_507_200,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mosaicml/mpt-7b": 6_649_286_656,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_937_344,
    "openai-community/gpt2-xl": 1_557_611_200,
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
    "tiiuae/falcon-7b": 7_217_189_760 - 65024 * 4544,
    # published rounded
    "Qwen/Qwen3.5-27B": 27_356_728_560,
    "Qwen/Qwen3.5-35B-A3B": 35_107_181_936,
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288,
    "ibm-granite/granite-20b-code-base": 20_066_993_152,
    "mosaicml/mpt-30b": 29_957_200_896,
    "tiiuae/falcon-40b": 41_303_293_952,
    "zai-org/GLM-4.5-Air": 106_852_245_504,
}
PUBLISHED_BILLIONS = {
    "Qwen/Qwen3.5-27B": 27,
    "Qwen/Qwen3.5-35B-A3B": 35,
    "facebook/opt-13b": 13,
    "facebook/opt-30b": 30,
    "ibm-granite/granite-20b-code-base": 20,
    "mosaicml/mpt-30b": 30,
    "tiiuae/falcon-40b": 41,
    "zai-org/GLM-4.5-Air": 107,
}


def published(name):
    return json.loads((source.SHIPPED / f"{name.replace('/', '--', 1)}.json").read_text())


def as_transformers(config):
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **rest)


def test_the_table_is_complete():
    assert set(PARAMETERS) == set(source.shipped())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    config = published(name)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(as_transformers(config))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PARAMETERS[name]
    if name in PUBLISHED_BILLIONS:
        assert round(count / 1e9) == PUBLISHED_BILLIONS[name]


MOVED = {
    "attn_config", "dtype", "hybrid_override_pattern", "layer_types", "num_hidden_layers",
    "partial_rotary_factor", "rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window",
    "torch_dtype",
}  # fmt: skip
"""Fields that transformers 5 keeps under another name, or drops where they are not in use."""
UNDECLARED = {
    "activation_dropout", "attn_output_gate", "cache_implementation", "full_attention_interval",
    "head_dim", "hidden_act", "mamba_ssm_dtype", "max_window_layers", "n_ctx",
    "normalization_function", "prefix", "quantization_config", "use_mrope",
}  # fmt: skip
"""Fields that publishers write and some configuration class does not declare."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_survives_transformers(name):
    """No field is misspelt: the configuration's class knows each, and has what the file says."""
    written = published(name)
    config = as_transformers(written)
    rest = {key: value for key, value in written.items() if key != "model_type"}
    if "text_config" in rest:
        config, rest = config.text_config, rest["text_config"]
    known = {field.name for field in dataclasses.fields(config)} | {"model_type"}
    known |= set(config.attribute_map)
    assert set(rest) - known - MOVED - UNDECLARED == set()
    assert {key for key in set(rest) - MOVED if getattr(config, key) != rest[key]} == set()
    assert config.num_hidden_layers == rest.get("num_hidden_layers", config.num_hidden_layers)
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    for field in {"rope_theta", "partial_rotary_factor"} & set(rest):
        assert full[field] == rest[field]
    scaling = dict(rest.get("rope_scaling") or {"rope_type": "default"})
    scaling.setdefault("rope_type", scaling.get("type"))
    assert {**scaling, **full} == full or not rope
    attention = rest.get("attn_config", {})
    assert {**config.to_dict().get("attn_config", {}), **attention} == {
        **attention,
        **config.to_dict().get("attn_config", {}),
    }
    if rest.get("use_sliding_window", True) and "sliding_window" in rest:
        assert config.sliding_window == rest["sliding_window"]

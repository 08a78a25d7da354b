"""The shipped configs build the models they name, parameter for parameter.

The counts are what the publishers give. On top, those known to the last digit: the hub's count of
the checkpoint's tensors (for Falcon, whose checkpoint holds the tied head twice, less the second
copy). Below, those published rounded only: the digits follow from the published shape (layers,
width, heads, vocabulary), and `PUBLISHED_BILLIONS` is what the model card or paper says.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pcg import source

PARAMETERS = {
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "bigcode/starcoder": 15_517_456_384,
    "facebook/opt-6.7b": 6_658_473_984,
    "google/gemma-2-27b": 27_227_128_320,
    "huggyllama/llama-13b": 13_015_864_320,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "huggyllama/llama-7b": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mosaicml/mpt-7b": 6_649_286_656,
    "openai-community/gpt2-xl": 1_557_611_200,
    "tiiuae/falcon-7b": 7_217_189_760 - 65024 * 4544,
    # published rounded
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288,
    "ibm-granite/granite-20b-code-base": 20_066_993_152,
    "mosaicml/mpt-30b": 29_957_200_896,
    "tiiuae/falcon-40b": 41_303_293_952,
}
PUBLISHED_BILLIONS = {
    "facebook/opt-13b": 13,
    "facebook/opt-30b": 30,
    "ibm-granite/granite-20b-code-base": 20,
    "mosaicml/mpt-30b": 30,
    "tiiuae/falcon-40b": 41,
}


def build(config):
    """Build the model that transformers makes of a config.json, on the meta device."""
    rest = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))


def test_the_table_is_complete():
    assert set(PARAMETERS) == set(source.shipped())


QUICK = {
    "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "bigcode/starcoder", "facebook/opt-6.7b",
    "tiiuae/falcon-7b", "huggyllama/llama-7b", "meta-llama/Llama-3.1-8B",
    "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "mosaicml/mpt-7b",
    "openai-community/gpt2-xl",
}  # fmt: skip
"""One of each architecture that is quickly built; the others are slow."""


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PARAMETERS],
)
def test_parameter_count(name):
    config = source.resolve(name).config
    model = build(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PARAMETERS[name]
    if name in PUBLISHED_BILLIONS:
        assert round(count / 1e9) == PUBLISHED_BILLIONS[name]
    assert type(model).__name__ in config["architectures"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_survives_transformers(name):
    """No field is misspelt: transformers gives back what the file says."""
    written = source.resolve(name).config
    rest = {key: value for key, value in written.items() if key != "model_type"}
    read = json.loads(AutoConfig.for_model(written["model_type"], **rest).to_json_string(False))
    # transformers 5 moved these.
    read["torch_dtype"] = read.get("dtype")
    rope = read.pop("rope_parameters", None) or {}
    assert rope.get("rope_theta", 10000.0) == written.pop("rope_theta", 10000.0)
    scaling = written.pop("rope_scaling", None) or {"rope_type": "default"}
    assert {**scaling, **rope} == rope or not rope
    if not written.get("use_sliding_window", True):
        del written["sliding_window"]  # transformers drops what is not in use
    attention = written.pop("attn_config", {})
    assert {**read.get("attn_config", {}), **attention} == read.get("attn_config", {})
    assert {key: value for key, value in written.items() if read.get(key) != value} == {}

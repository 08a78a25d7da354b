"""Measured without data against measured with it: what eager transformers + peft save, to the byte.

The oracle is torch.autograd.graph.saved_tensors_hooks on a real model, in
tests.support.saved_tensors, whose layers all run.
"""

import peft
import pytest
import torch

from pcg.explain.baselines.eager_memory import EagerModel
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import recipe_from
from pcg.source import resolve
from tests.support import oracle
from tests.support.bottlenecks import RECIPES
from tests.support.eager_cases import CAUSAL, Case, drawn
from tests.support.families import FAMILIES
from tests.support.saved_tensors import saved_bytes

BATCH, SEQ = 2, 16
BY_NAME = {family.name: family for family in FAMILIES}

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE = {
    **MIXTRAL,
    "model_type": "qwen3_moe",
    "head_dim": 24,
    "moe_intermediate_size": 48,
    "num_experts": 4,
}


def slow(*values):
    """A case of the slow tests, which has a shorter one beside it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def check(config, dtype, adapter, batch=BATCH):
    case = Case(config, dtype, adapter, batch, SEQ)
    assert case.predicted().total == case.expected()


def lora(targets, **fields):
    return peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **fields)


SOME = ("qwen2.5-windows", "opt", "gpt2", "gemma2", "falcon-7b", "falcon-40b")


@pytest.mark.parametrize("name", ["llama3", *map(slow, SOME)])
def test_a_family_keeps_what_is_predicted(name):
    family = BY_NAME[name]
    check(family.config(3), torch.bfloat16, lora(list(family.usual_targets)))


@pytest.mark.parametrize("name", ["llama3", slow("falcon-7b")])
def test_a_family_in_fp32(name):
    check(BY_NAME[name].config(3), torch.float32, lora("all-linear"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_family(family, dtype):
    excluded = {"exclude_modules": list(family.excluded)} if family.excluded else {}
    check(family.config(3), dtype, lora("all-linear", **excluded))


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 8}},
        {"bias": "lora_only"},
        {"bias": "all"},
    ],
    ids=str,
)
def test_options_of_a_recipe(fields):
    check(BY_NAME["opt"].config(3), torch.float32, lora(["q_proj", "fc2"], **fields))


# -------------------------------------------------------------------------------------- methods


def _targets(family):
    return list(family.usual_targets)


METHODS = {
    "LoRA with dropout": lambda family: lora(_targets(family), lora_dropout=0.1),
    "lora_bias": lambda family: lora(_targets(family), lora_bias=True),
    "LoRA and all biases": lambda family: lora(_targets(family), bias="all"),
    "DoRA": lambda _: lora("all-linear", use_dora=True),
    "DoRA with dropout": lambda family: lora(_targets(family), use_dora=True, lora_dropout=0.1),
    "DoRA and its biases": lambda family: lora(_targets(family), use_dora=True, bias="lora_only"),
    "VeRA": lambda family: peft.VeraConfig(r=4, target_modules=_targets(family)),
    "VeRA with dropout": lambda family: peft.VeraConfig(
        r=4, target_modules=_targets(family), vera_dropout=0.1, bias="all"
    ),
    "LoHa": lambda family: peft.LoHaConfig(r=3, target_modules=_targets(family)),
    "(IA)3": lambda family: peft.IA3Config(target_modules=_targets(family), feedforward_modules=[]),
    "(IA)3 of inputs": lambda family: peft.IA3Config(
        target_modules=_targets(family), feedforward_modules=_targets(family)
    ),
    "AdaLoRA": lambda family: peft.AdaLoraConfig(
        init_r=5, target_r=3, total_step=20, target_modules=_targets(family), **CAUSAL
    ),
    "BitFit": lambda _: None,
    "Houlsby": lambda _: {"peft_type": "BOTTLENECK", **RECIPES["houlsby"]},
    "parallel": lambda _: {"peft_type": "BOTTLENECK", **RECIPES["parallel"]},
    "prompt tuning": lambda _: peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "prefix tuning": lambda _: peft.PrefixTuningConfig(num_virtual_tokens=7, **CAUSAL),
    "projected prefix": lambda _: peft.PrefixTuningConfig(
        num_virtual_tokens=7, prefix_projection=True, encoder_hidden_size=24, **CAUSAL
    ),
    "P-tuning": lambda _: peft.PromptEncoderConfig(num_virtual_tokens=3, **CAUSAL),
    "P-tuning's LSTM": lambda _: peft.PromptEncoderConfig(
        num_virtual_tokens=4, encoder_reparameterization_type="LSTM", **CAUSAL
    ),
}
"""By name, for a family; peft's default targets where it knows them."""
WITHOUT = {
    "BitFit": {"llama3", "gemma2", "mpt", "falcon-7b"},
    "prompt tuning": {"mpt"},
    "prefix tuning": {"mpt", "falcon-7b"},
    "LoHa": {"gpt2"},
}
"""Families without biases, those of which peft does not know the heads of keys, and Conv1D's."""

SPREAD = [
    ("llama3", "LoRA with dropout", torch.bfloat16),
    ("llama3", "prefix tuning", torch.float32),
    ("gpt2", "DoRA", torch.bfloat16),
    ("opt", "VeRA with dropout", torch.bfloat16),
    ("opt", "BitFit", torch.float32),
    slow("gpt_neox", "(IA)3", torch.bfloat16),
    ("gemma2", "prefix tuning", torch.bfloat16),
    slow("qwen2", "DoRA with dropout", torch.bfloat16),
    slow("mpt", "DoRA", torch.bfloat16),
    slow("bloom", "prefix tuning", torch.bfloat16),
    slow("gptj", "(IA)3 of inputs", torch.bfloat16),
    ("llama3", "AdaLoRA", torch.bfloat16),
    ("gpt2", "AdaLoRA", torch.float32),
    ("opt", "Houlsby", torch.bfloat16),
    ("llama3", "parallel", torch.float32),
    slow("gpt2", "P-tuning", torch.float32),
    ("llama3", "P-tuning's LSTM", torch.float32),
    ("opt", "projected prefix", torch.bfloat16),
    ("llama3", "LoHa", torch.bfloat16),
    ("opt", "LoHa", torch.float32),
]


@pytest.mark.parametrize(("name", "method", "dtype"), SPREAD, ids=str)
def test_a_method_keeps_what_is_predicted(name, method, dtype):
    check(BY_NAME[name].config(3), dtype, METHODS[method](BY_NAME[name]))


GRID = ("llama3", "gpt2", "opt", "gpt_neox", "gemma2", "qwen2", "bloom", "gptj", "mpt", "falcon-7b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n in GRID for m in METHODS if n not in WITHOUT.get(m, ())]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_method_keeps_what_is_predicted(name, method, dtype, batch):
    check(BY_NAME[name].config(3), dtype, METHODS[method](BY_NAME[name]), batch=batch)


@pytest.mark.parametrize("name", ["llama3", slow("falcon-7b"), "bloom"])
def test_one_sequence_alone(name):
    check(BY_NAME[name].config(3), torch.bfloat16, lora("all-linear"), batch=1)


def test_adapters_of_the_head():
    adapter = lora(["lm_head", "v_proj"], use_dora=True)
    check(BY_NAME["llama3"].config(3), torch.bfloat16, adapter)


@pytest.mark.parametrize("config", [slow(MIXTRAL), QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_keep_what_is_predicted(config):
    check({**config, "num_hidden_layers": 3}, torch.bfloat16, lora(["q_proj", "v_proj"]))


# MiB a layer at batch 1, sequence 1024, bf16, with adapters in fp32.
MEASURED_MIB = [
    ("meta-llama/Llama-3.1-8B", ("down_proj",), 16, 192.2),
    ("meta-llama/Llama-3.1-8B", "all-linear", 16, 288.6),
    ("meta-llama/Llama-3.1-70B", ("down_proj",), 16, 380.3),
    ("facebook/opt-6.7b", ("q_proj", "k_proj", "v_proj", "out_proj"), 8, 144.3),
]


@pytest.mark.parametrize(("model", "targets", "rank", "mib"), MEASURED_MIB)
def test_true_shapes(model, targets, rank, mib):
    recipe = LoraConfig(r=rank, target_modules=targets)
    found = EagerModel(resolve(model).config, "bfloat16", recipe, {}).step(1, 1024)
    assert found.layers[-1] == found.bytes_per_layer
    assert found.bytes_per_layer / 2**20 == pytest.approx(mib, abs=0.06)


def test_a_module_of_its_own():
    """ReLU in place of SiLU in one layer, which saves its output alone."""
    module = oracle.random_model(BY_NAME["llama3"].config(4))
    module.model.layers[2].mlp.act_fn = torch.nn.ReLU()
    adapter = lora(["q_proj", "down_proj"])
    found = EagerModel(module, "float32", recipe_from(adapter), {}).step(BATCH, SEQ)
    assert found.total == saved_bytes(module, torch.float32, adapter, batch=BATCH, seq=SEQ)
    assert found.layers[2] != found.layers[1] == found.layers[3]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*((method, torch.float32) for method in METHODS), ("AdaLoRA", torch.bfloat16)],
    ids=str,
)
def test_parameters_that_peft_trains(method, dtype):
    """Of all layers, though those that are alike are one module here.

    Over a bf16 base peft trains AdaLoRA's `ranknum`, too.
    """
    family = BY_NAME["opt"]
    case = Case(family.config(3), dtype, METHODS[method](family), BATCH, SEQ)
    assert case.model.trainable == case.expected_trainable()


# --------------------------------------------------------------------------------- random cases


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n == 1 else pytest.mark.slow) for n in range(300)]
)
def test_any_causal_lm_with_any_method(seed):
    case, predicted, expected = drawn(seed)
    assert predicted.total == expected, case

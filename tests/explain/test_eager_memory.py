"""Predicted against measured: what eager transformers + peft keeps for backward, to the byte.

The oracle is torch.autograd.graph.saved_tensors_hooks on the real model, in
tests.support.saved_tensors.
The difference of 3 and 2 layers is one layer; what is outside the layers is the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import peft
import pytest
import sympy
import torch

from pcg.explain.adapter_use import adapter_use
from pcg.explain.eager.memory import EagerMemory, eager_memory
from pcg.explain.eager.saved_storages import EagerRun
from pcg.ir.analysis.storages import SEQUENCES, Storages
from pcg.ir.builder import Builder
from pcg.ir.types import CONTEXT, TOKENS, TORCH_NAMES, tensor
from pcg.options import PlanOptions
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.bitfit import BitFitConfig
from pcg.peft.lora import LoraConfig
from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_from
from pcg.source import resolve
from tests.support.families import FAMILIES, Family
from tests.support.saved_tensors import SHORT_NAMES, saved_bytes

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


def predicted(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    recipe: Recipe,
    adapter_dtype: str = "f32",
    dropout: float = 0.0,
    batch: int = BATCH,
) -> EagerMemory:
    passes = pipeline(Settings(PlanOptions(dtype=TORCH_NAMES[SHORT_NAMES[dtype]])))
    traced = passes.trace.run(config)
    base = passes.fold.run(traced).model
    use = adapter_use(base, {"a": recipe}, str(config["model_type"]), "f32")
    # On the CPU layer norm keeps its statistics in the dtype of its input, on CUDA in fp32.
    eager = EagerRun(
        use.at,
        traced.trace.attention,
        str(config["model_type"]),
        batch,
        SEQ,
        use.bypasses.biases,
        adapter_dtype,
        dropout,
        base.dtype,
    )
    return eager_memory(base, eager)


def number(formula: sympy.Expr, batch: int = BATCH, seq: int = SEQ) -> int:
    return int(formula.subs({SEQUENCES: batch, CONTEXT: seq}))


def check(
    config: Mapping[int, Mapping[str, Any]],
    dtype: torch.dtype,
    adapter: peft.PeftConfig | None,
    autocast: bool = True,
    batch: int = BATCH,
) -> None:
    """Compare a whole model of 3 layers, and its last layer, with what is measured."""
    measured = {
        layers: saved_bytes(
            config[layers], dtype, copy.deepcopy(adapter), batch=batch, seq=SEQ, autocast=autocast
        )
        for layers in (2, 3)
    }
    recipe = BitFitConfig() if adapter is None else recipe_from(adapter)
    adapter_dtype = "f32" if autocast else SHORT_NAMES[dtype]
    found = predicted(config[3], dtype, recipe, adapter_dtype, recipe.dropout, batch)
    if getattr(adapter, "layers_to_transform", None) is None:
        assert number(found.layers[-1], batch) == measured[3] - measured[2]
    assert number(found.total, batch) == measured[3]


def lora(targets: Any, **fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **fields)


def layers_of(family: Family) -> dict[int, Mapping[str, Any]]:
    return {layers: family.config(layers) for layers in (2, 3)}


FAST = ("llama3", "qwen2.5-windows", "opt", "gpt2", "gemma2", "falcon-7b", "falcon-40b")


@pytest.mark.parametrize("name", FAST)
def test_a_family_keeps_what_is_predicted(name: str) -> None:
    family = BY_NAME[name]
    check(layers_of(family), torch.bfloat16, lora(list(family.usual_targets)))


@pytest.mark.parametrize("name", ["llama3", "gpt_neox", "falcon-7b", "phi3", "cohere"])
def test_a_family_in_fp32(name: str) -> None:
    check(layers_of(BY_NAME[name]), torch.float32, lora("all-linear"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_every_family_keeps_what_is_predicted(
    family: Family, dtype: torch.dtype, autocast: bool
) -> None:
    excluded = {"exclude_modules": list(family.excluded)} if family.excluded else {}
    check(layers_of(family), dtype, lora("all-linear", **excluded), autocast)


@pytest.mark.parametrize("name", ["llama3", "stablelm"])
def test_adapters_in_the_dtype_of_the_base(name: str) -> None:
    check(layers_of(BY_NAME[name]), torch.bfloat16, lora("all-linear"), autocast=False)


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
def test_options_of_a_recipe(fields: dict[str, Any]) -> None:
    check(layers_of(BY_NAME["opt"]), torch.float32, lora(["q_proj", "fc2"], **fields))


# -------------------------------------------------------------------------------------- methods


def _targets(family: Family) -> list[str]:
    return list(family.usual_targets)


CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
METHODS: Mapping[str, Callable[[Family], peft.PeftConfig | None]] = {
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
    "BitFit": lambda _: None,
    "prompt tuning": lambda _: peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "prefix tuning": lambda _: peft.PrefixTuningConfig(num_virtual_tokens=7, **CAUSAL),
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
    ("gpt_neox", "(IA)3", torch.bfloat16),
    ("gemma2", "prefix tuning", torch.bfloat16),
    ("qwen2", "DoRA with dropout", torch.bfloat16),
    ("mpt", "DoRA", torch.bfloat16),
    ("bloom", "prefix tuning", torch.bfloat16),
    ("gptj", "(IA)3 of inputs", torch.bfloat16),
    ("llama3", "LoHa", torch.bfloat16),
    ("opt", "LoHa", torch.float32),
]


@pytest.mark.parametrize(("name", "method", "dtype"), SPREAD, ids=str)
def test_a_method_keeps_what_is_predicted(name: str, method: str, dtype: torch.dtype) -> None:
    check(layers_of(BY_NAME[name]), dtype, METHODS[method](BY_NAME[name]))


GRID = ("llama3", "gpt2", "opt", "gpt_neox", "gemma2", "qwen2", "bloom", "gptj", "mpt", "falcon-7b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [(n, m) for n in GRID for m in METHODS if n not in WITHOUT.get(m, ())],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_method_keeps_what_is_predicted(
    name: str, method: str, dtype: torch.dtype, batch: int
) -> None:
    check(layers_of(BY_NAME[name]), dtype, METHODS[method](BY_NAME[name]), batch=batch)


@pytest.mark.parametrize("method", ["DoRA", "VeRA", "LoHa"])
def test_adapters_of_a_method_in_the_dtype_of_the_base(method: str) -> None:
    family = BY_NAME["llama3"]
    check(layers_of(family), torch.bfloat16, METHODS[method](family), autocast=False)


@pytest.mark.parametrize("name", ["llama3", "falcon-7b", "bloom"])
def test_one_sequence_alone(name: str) -> None:
    check(layers_of(BY_NAME[name]), torch.bfloat16, lora("all-linear"), batch=1)


def test_adapters_of_the_head() -> None:
    adapter = lora(["lm_head", "v_proj"], use_dora=True)
    check(layers_of(BY_NAME["llama3"]), torch.bfloat16, adapter)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_keep_what_is_predicted(config: dict[str, Any]) -> None:
    configs = {layers: {**config, "num_hidden_layers": layers} for layers in (2, 3)}
    check(configs, torch.bfloat16, lora(["q_proj", "v_proj"]))


def test_without_adapters_nothing_is_kept() -> None:
    passes = pipeline(Settings())
    base = passes.fold.run(passes.trace.run(BY_NAME["llama3"].config(2))).model
    assert eager_memory(base, EagerRun({}, "sdpa", "llama", BATCH, SEQ)).total == 0


# MiB a layer at batch 1, sequence 1024, bf16, measured on meta tensors of the true shapes.
MEASURED_MIB = [
    ("meta-llama/Llama-3.1-8B", ("down_proj",), 16, "f32", 192.2),
    ("meta-llama/Llama-3.1-8B", ("down_proj",), 16, "bf16", 164.2),
    ("meta-llama/Llama-3.1-8B", "all-linear", 16, "f32", 288.6),
    ("meta-llama/Llama-3.1-8B", "all-linear", 16, "bf16", 180.4),
    ("meta-llama/Llama-3.1-70B", ("down_proj",), 16, "f32", 380.3),
    ("facebook/opt-6.7b", ("q_proj", "k_proj", "v_proj", "out_proj"), 8, "f32", 144.3),
    ("facebook/opt-6.7b", ("q_proj", "k_proj", "v_proj", "out_proj"), 8, "bf16", 88.2),
]


@pytest.mark.parametrize(("model", "targets", "rank", "adapters", "mib"), MEASURED_MIB)
def test_true_shapes(
    model: str, targets: str | tuple[str, ...], rank: int, adapters: str, mib: float
) -> None:
    config = {**resolve(model).config, "num_hidden_layers": 2}
    recipe = LoraConfig(r=rank, target_modules=targets)
    found = predicted(config, torch.bfloat16, recipe, adapters, batch=1)
    assert number(found.layers[-1], 1, 1024) / 2**20 == pytest.approx(mib, abs=0.06)


# ------------------------------------------------------------------------------------- storages


def test_views_share_memory_and_copies_do_not() -> None:
    builder = Builder("g")
    builder.input("qkv", tensor("f32", TOKENS, 2, 5, 8))
    query = builder.add("slice", ["qkv"], name="query", dim=-2, start=0, stop=3)
    joined = builder.add("reshape", [query], name="joined", shape=(-1, 6, 8))
    key = builder.add("slice", ["qkv"], name="key", dim=-2, start=3, stop=4)
    spread = builder.add("expand", [key], name="spread", shape=(-1, 2, 3, 8))
    repeated = builder.add("reshape", [spread], name="repeated", shape=(-1, 6, 8))
    row = builder.add("slice", ["qkv"], name="row", dim=-3, start=1, stop=2)
    flat = builder.add("reshape", [row], name="flat", shape=(-1, 40))
    taken = builder.add("slice", ["qkv"], name="taken", dim=-2, start=4, stop=5, copied=True)
    outputs = [joined, repeated, flat, taken]
    graph = builder.build(outputs)
    eager, ours = Storages.of(graph, eager=True), Storages.of(graph)
    assert [eager[name].name for name in outputs] == ["joined", "repeated", "qkv", "taken"]
    assert [ours[name].name for name in outputs] == ["joined", "repeated", "qkv", "qkv"]


@pytest.mark.parametrize("shape", [(4, 6), (2, 2, 6), (24,), (2, 12), (8, 3), (4, 2, 3)])
@pytest.mark.parametrize("start", [0, 2])
def test_a_reshape_is_a_view_where_torch_makes_one(shape: tuple[int, ...], start: int) -> None:
    builder = Builder("g")
    builder.input("x", tensor("f32", TOKENS, 4, 6 + start))
    part = builder.add("slice", ["x"], name="part", dim=-1, start=start, stop=6 + start)
    builder.add("reshape", [part], name="y", shape=(-1, *shape))
    storages = Storages.of(builder.build(["y"]))
    x = torch.zeros(3, 4, 6 + start)
    y = x[..., start:].reshape(3, *shape)
    is_view = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (storages["y"].name == "x") == is_view

"""DoRA's own: the factor that serving makes once, what it begins as, and what is refused."""

from __future__ import annotations

import peft
import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import AdapterError, PcgError
from pcg.ir.printer import print_graph
from pcg.passes.attach import attach
from pcg.peft.adapter import new_adapter
from pcg.peft.lora import LoraConfig, LoraWeights
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.mlp import mlp_model
from tests.support.peft_cases import wrap
from tests.support.prompts import TOLERANCE, prompts

DOWN = "model.layers.{layer}.down"
FIELDS = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}


def test_training_makes_the_factor_and_serving_is_given_it() -> None:
    bypasses = lora({DOWN: 2}, use_dora=True)
    (block,) = attach(mlp_model(), bypasses).blocks
    ops = [node.op for node in block.nodes]
    added = ["shrink", "expand_add", "column_norm", "column_factor", "scale"]
    assert ops == ["rms_norm", "linear", "relu", "linear", *added, "add"]
    assert "scale(%down_z, %down_factor, %down.bias)" in print_graph(block)
    (block,) = attach(mlp_model(), bypasses.for_serving()).blocks
    assert "scale(%down_z, %down.lora_factor, %down.bias)" in print_graph(block)
    assert "column_norm" not in print_graph(block)


def test_dropout_drops_of_the_bases_product_too() -> None:
    bypasses = lora({DOWN: 2}, dropout=0.5, use_dora=True)
    (block,) = attach(mlp_model(), bypasses).blocks
    added = [node.op for node in block.nodes][4:]
    assert added == ["dropout", "linear", "shrink", "expand_add", "column_norm", "column_factor",
                     "scale", "sub", "add", "add"]  # fmt: skip


def test_the_factor_is_made_once_until_the_adapter_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    executor.add_adapter("a", FIELDS)
    executor.add_adapter("b", FIELDS, seed=1)
    calls = []
    norm = LoraWeights._norm
    monkeypatch.setattr(
        LoraWeights, "_norm", lambda self, around: calls.append(self) or norm(self, around)
    )
    sequences = prompts((5, 4))
    executor.logits(sequences, ["a", "b"])
    assert len(calls) == len({*calls}) == 8  # two adapters, two modules, two layers
    executor.logits(sequences, ["b", "a"])
    executor.generate(sequences, ["a", None], max_new_tokens=3, ignore_eos=True)
    executor.add_adapter("c", {**FIELDS, "use_dora": False})
    executor.logits(sequences, ["a", "b"])
    assert len(calls) == 8
    executor.finetune([Example(s, s) for s in sequences], "a", max_steps=2, progress=False)
    before = len(calls)
    executor.logits(sequences, ["a", "b"])
    assert len(calls) == before + 4


@pytest.mark.parametrize("init", [True, False])
def test_magnitudes_begin_as_the_lengths(init: bool) -> None:
    base = oracle.random_model(BY_NAME["gpt2"].config(2))
    executor = compiler.compile(base)
    fields = {**FIELDS, "target_modules": ["c_attn"], "init_lora_weights": init}
    adapter = executor.add_adapter("a", fields)
    for path, weights in adapter.weights.items():
        assert isinstance(weights, LoraWeights)
        weight = base.get_submodule(path).weight.data.t()
        whole = weight + weights.scale * weights.b @ weights.a
        torch.testing.assert_close(weights.magnitude, whole.norm(dim=1))


def test_half_precision() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2), torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    wrapped = wrap(base, config)
    executor = compiler.compile(base)
    adapter = executor.add_adapter("a", FIELDS)
    for path, weights in adapter.weights.items():
        assert isinstance(weights, LoraWeights)
        theirs = wrapped.base_model.model.get_submodule(path)
        pairs = (
            (weights.a, theirs.lora_A),
            (weights.b, theirs.lora_B),
            (weights.magnitude, theirs.lora_magnitude_vector),
        )
        for tensor, module in pairs:
            assert tensor is not None
            tensor.copy_(module["default"].weight.data)
    executor.refresh_adapter("a")
    sequences = prompts((9, 5))
    for logits, sequence in zip(executor.logits(sequences, "a"), sequences, strict=True):
        expected = oracle.logits(wrapped, sequence).float()
        assert oracle.relative_error(logits.float(), expected) < 0.03
    result = executor.finetune([Example(s, s) for s in sequences], "a", max_steps=2, progress=False)
    assert all(loss > 0 for loss in result.losses)


def test_what_is_refused() -> None:
    with pytest.raises(AdapterError, match="lora_bias=True does not go with use_dora=True"):
        recipe_from({**FIELDS, "lora_bias": True})
    recipe = LoraConfig(target_modules=("q",), use_dora=True)
    with pytest.raises(AdapterError, match="give base_weights"):
        new_adapter("x", recipe, {"a.q": (4, 4)})


def test_another_recipe_is_not_gone_on_with() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    executor.add_adapter("a", FIELDS)
    data = [Example(s, s) for s in prompts((5,))]
    with pytest.raises(PcgError, match=r"none|rank 4 with scale 2 at .* and DoRA"):
        executor.finetune(data, "a", peft={**FIELDS, "use_dora": False}, max_steps=1)


def test_lora_alone_is_served_as_before() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    executor.add_adapter("a", {**FIELDS, "use_dora": False})
    ops = {node.op for block in executor.serving.runner.model.blocks for node in block.nodes}
    assert "scale" not in ops
    executor.add_adapter("b", FIELDS)
    (sequence,) = prompts((9,))
    expected = oracle.logits(base, sequence)
    for name in ("a", "b"):
        found = executor.logits([sequence], name)[0]
        assert oracle.relative_error(found, expected) < TOLERANCE

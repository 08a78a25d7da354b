"""Bottleneck adapters against plain PyTorch modules hooked into the transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.bottleneck import BottleneckConfig, BottleneckWeights
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.bottlenecks import (
    FIELDS,
    RECIPES,
    hooked,
    state,
)
from tests.support.families import BY_NAME, FAMILIES
from tests.support.prompts import TOLERANCE, prompts


def case(family: str) -> tuple[Any, dict[str, Any], dict[str, Any], Executor]:
    base = oracle.random_model(BY_NAME[family].config(2))
    executor = compiler.compile(base)
    torch.manual_seed(0)
    models: dict[str, Any] = {}
    adapters: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        ours = executor.add_adapter(name, {**FIELDS, **recipe})
        models[name], adapters[name] = hooked(base, list(ours.weights), recipe)
        for path, weights in ours.weights.items():
            for tensor, theirs in zip(weights.tensors, state(adapters[name][path]), strict=True):
                tensor.copy_(theirs.data)
        executor.refresh_adapter(name)
    executor.add_adapter("lora", {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"})
    executor.add_adapter("ia3", {"peft_type": "IA3"})
    return base, models, adapters, executor


FAST = ("opt", "gpt2", "gpt_neox", "falcon-40b", "cohere", "mpt")
"""Families whose layers differ most; the others in the slow run."""


@pytest.mark.parametrize("family", ["opt", "llama3", "gpt2"])
def test_mixed_logits_tokens_and_gradients(family: str) -> None:
    base, models, adapters, executor = case(family)
    names: list[str | None] = [None, *models, "lora", "ia3", *models]
    for lengths in ([5 + i % 4 for i in range(len(names))], [6] * len(names)):
        for chosen in (names, list(models)):
            sequences = prompts(lengths[: len(chosen)])
            found = executor.logits(sequences, chosen)
            for logits, sequence, name in zip(found, sequences, chosen, strict=True):
                expected = oracle.logits(models.get(name or "", base), sequence)
                assert oracle.relative_error(logits, expected) < TOLERANCE, name
    sequences = prompts([4] * len(names))
    done = executor.generate(sequences, names, max_new_tokens=6, ignore_eos=True)
    for completion, sequence, name in zip(done, sequences, names, strict=True):
        expected_ids = oracle.greedy(models.get(name or "", base), sequence, 6)
        assert list(completion.token_ids) == expected_ids, name

    sequences = prompts((9, 4))
    for name, model in models.items():
        runner = executor.training_runner(name)
        loss = runner.forward_backward([Example(s, s) for s in sequences], 11)
        expected_loss, _ = oracle.loss_and_gradients(model, sequences)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        ours = executor.adapters[name].weights
        assert len(runner.parameters) == 4 * len(ours)
        for path, weights in ours.items():
            for tensor, theirs in zip(weights.tensors, state(adapters[name][path]), strict=True):
                assert tensor.grad is not None
                assert theirs.grad is not None
                error = (tensor.grad - theirs.grad).norm() / theirs.grad.norm()
                assert error < TOLERANCE, (name, path)


def test_files_and_finetuning(tmp_path: Path) -> None:
    base, models, _, executor = case("gpt2")
    (sequence,) = prompts((9,))
    for name in models:
        executor.save_adapter(name, tmp_path / name)
    other = compiler.compile(base, {name: str(tmp_path / name) for name in models})
    for name, model in models.items():
        found = other.logits([sequence], name)[0]
        assert oracle.relative_error(found, oracle.logits(model, sequence)) < TOLERANCE
    config = json.loads((tmp_path / "houlsby" / "adapter_config.json").read_text())
    assert {name: config[name] for name in RECIPES["houlsby"]} == RECIPES["houlsby"]
    assert config["target_modules"] == ["attn.c_proj", "mlp.c_proj"]
    other.add_adapter("new", {**FIELDS, "variant": "houlsby"})
    plain = other.logits([sequence])[0]
    assert oracle.relative_error(other.logits([sequence], "new")[0], plain) < TOLERANCE
    data = [Example(sequence, sequence)]
    result = other.finetune(data, "new", max_steps=5, learning_rate=0.02, progress=False)
    assert result.losses[-1] < result.losses[0]

    file = tmp_path / "houlsby" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("adapter_down.bias"))
    save_file({k: v for k, v in tensors.items() if k != key}, file)
    with pytest.raises(AdapterError, match=r"adapter_down.bias, the partner of another"):
        other.add_adapter("damaged", tmp_path / "houlsby")
    save_file({**tensors, key: tensors[key][:3].clone()}, file)
    with pytest.raises(AdapterError, match=r"\[3\], .*; expected \[4, 64\], \[4\], "):
        other.add_adapter("damaged", tmp_path / "houlsby")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family.name in FAST else pytest.mark.slow)
        for family in FAMILIES
        if not family.extra
    ],
    ids=str,
)
def test_every_family_has_its_modules(family: Any) -> None:
    program = compiler.compile_program(family.config(2), {**FIELDS, "variant": "houlsby"})
    recipe = recipe_from({**FIELDS, "variant": "houlsby"})
    assert len(recipe.bypasses(tuple(program.base.linear_modules()))) == 4  # two in each layer
    compiler.compile_program(family.config(2), {**FIELDS, "variant": "parallel"})


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="r=8, a field it does not know"):
        recipe_from({**FIELDS, "r": 8})
    for fields, message in (
        ({"variant": "compacter"}, "variant='compacter'; use one of houlsby, parallel, pfeiffer"),
        ({"non_linearity": "swish"}, "non_linearity='swish'; use one of gelu"),
        ({"bottleneck_size": 0}, "bottleneck_size=0"),
        ({"scaling": float("nan")}, "scaling=nan"),
    ):
        with pytest.raises(AdapterError, match=message):
            BottleneckConfig(**fields)
    config = BY_NAME["llama3"].config(2)
    fields = {"variant": "parallel", "target_modules": ["o_proj"]}
    with pytest.raises(UnsupportedError, match=r"self_attn\.o_proj ends no MLP"):
        compiler.compile_program(config, {**FIELDS, **fields})
    weights = compiler.compile(oracle.random_model(config)).add_adapter("a", FIELDS).weights
    assert all(isinstance(w, BottleneckWeights) for w in weights.values())

"""BitFit and bottlenecks, which peft has not, against transformers and autograd."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import pcg.compiler as compiler
from pcg.errors import AdapterError
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.biases import biases
from tests.support.bottlenecks import FIELDS, RECIPES, hooked, state
from tests.support.families import BY_NAME, FAMILIES
from tests.support.parameters import mostly_slow
from tests.support.prompts import TOLERANCE, prompts

BITFIT = {"peft_type": "BITFIT"}


def with_biases(base: Any, executor: Executor) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """Adapter `bitfit`, the base with the same other biases, and what autograd trains."""
    executor.add_adapter("bitfit", BITFIT)
    tuned = copy.deepcopy(base).requires_grad_(False)
    ours, theirs = executor.training_runner("bitfit").parameters, biases(tuned)
    assert ours.keys() == theirs.keys()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in theirs.items():
        parameter.requires_grad_(True)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        ours[path].copy_(parameter.data)
    executor.refresh_adapter("bitfit")
    return {"bitfit": (tuned, theirs)}


def with_bottlenecks(base: Any, executor: Executor) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """An adapter of each recipe, and the base with plain modules hooked in."""
    torch.manual_seed(0)
    found = {}
    for name, recipe in RECIPES.items():
        weights = executor.add_adapter(name, {**FIELDS, **recipe}).weights
        model, adapters = hooked(base, list(weights), recipe)
        names = {id(t): n for n, t in executor.training_runner(name).parameters.items()}
        tensors = {}
        for path, own in weights.items():
            for tensor, theirs in zip(own.tensors, state(adapters[path]), strict=True):
                tensor.copy_(theirs.data)
                tensors[names[id(tensor)]] = theirs
        executor.refresh_adapter(name)
        found[name] = model, tensors
    return found


@pytest.mark.parametrize(
    ("made", "family"),
    [
        pytest.param(with_biases, "opt", id="biases-opt"),
        pytest.param(with_biases, "gpt_neox", id="biases-gpt_neox", marks=pytest.mark.slow),
        pytest.param(with_biases, "starcoder2", id="biases-starcoder2", marks=pytest.mark.slow),
        pytest.param(with_bottlenecks, "gpt2", id="bottlenecks-gpt2"),
        pytest.param(with_bottlenecks, "llama3", id="bottlenecks-llama3", marks=pytest.mark.slow),
    ],
)
def test_mixed_logits_tokens_and_gradients(made: Any, family: str) -> None:
    base = oracle.random_model(BY_NAME[family].config(2))
    executor = compiled.executor(base)
    models = made(base, executor)
    executor.add_adapter("lora", {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"})
    ia3 = {"peft_type": "IA3", "target_modules": "all-linear", "feedforward_modules": []}
    executor.add_adapter("ia3", ia3)
    names: list[str | None] = [None, *models, "lora", "ia3", *models]

    def model_of(name: str | None) -> Any:
        return models[name][0] if name in models else base

    for lengths in ([5 + i % 4 for i in range(len(names))], [6] * len(names)):
        sequences = prompts(lengths)
        found = executor.logits(sequences, names)
        for logits, sequence, name in zip(found, sequences, names, strict=True):
            expected = oracle.logits(model_of(name), sequence)
            assert oracle.relative_error(logits, expected) < TOLERANCE, name
    done = executor.generate(sequences, names, max_new_tokens=6, ignore_eos=True)
    for completion, sequence, name in zip(done, sequences, names, strict=True):
        assert list(completion.token_ids) == oracle.greedy(model_of(name), sequence, 6), name
    sequences = prompts((9, 4))
    for name, (model, tensors) in models.items():
        runner = executor.training_runner(name)
        loss = runner.forward_backward([Example(s, s) for s in sequences], 11)
        expected_loss, _ = oracle.loss_and_gradients(model, sequences)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert runner.parameters.keys() == tensors.keys()
        largest = max(float(t.grad.norm()) for t in tensors.values())
        for path, parameter in runner.parameters.items():
            theirs = tensors[path].grad
            # A key's bias moves all scores of a token alike: its gradient is rounding alone.
            scale = max(float(theirs.norm()), 1e-2 * largest if name == "bitfit" else 0.0)
            assert float((parameter.grad - theirs).norm()) < TOLERANCE * scale, path


def test_biases_of_one_sum_have_gradients_of_their_own() -> None:
    """Attention's and the MLP's are added to one sum; batches add to each, and clipping scales."""
    base = oracle.random_model(BY_NAME["gpt_neox"].config(2))
    executor = compiled.executor(base)
    with_biases(base, executor)
    runner = executor.training_runner("bitfit")
    examples = [Example(s, s) for s in prompts((9, 4))]
    once: list[Any] = []
    twice: list[Any] = []
    for found, count in ((once, 1), (twice, 2)):
        for _ in range(count):
            runner.forward_backward(examples, 11)
        for parameter in runner.parameters.values():
            found.append(parameter.grad)
            parameter.grad = None
    assert len({gradient.data_ptr() for gradient in twice}) == len(twice)
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-4, atol=1e-6)


def test_files_and_finetuning_of_biases(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["gpt2"].config(2))
    executor = compiled.executor(base)
    data = [Example(s, s) for s in prompts((9, 7))]
    options = {"max_steps": 4, "learning_rate": 0.02, "progress": False}
    result = executor.finetune(data, "a", peft=BITFIT, **options)
    assert result.losses[-1] < result.losses[0]
    executor.save_adapter("a", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "BITFIT"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}" for name in biases(base)}
    tuned = copy.deepcopy(base)
    own = {key.removeprefix("base_model.model."): t for key, t in tensors.items()}
    tuned.load_state_dict(own, strict=False)
    other = compiled.executor(base, {"b": str(tmp_path)}, is_own=True)
    found = other.logits([data[0].ids], "b")[0]
    assert oracle.relative_error(found, oracle.logits(tuned, data[0].ids)) < TOLERANCE
    without = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(2)))
    with pytest.raises(AdapterError, match="has no biases; use LoRA"):
        without.add_adapter("a", BITFIT)


def test_files_and_finetuning_of_bottlenecks(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["gpt2"].config(2))
    executor = compiled.executor(base)
    models = with_bottlenecks(base, executor)
    (sequence,) = prompts((9,))
    for name in models:
        executor.save_adapter(name, tmp_path / name)
    saved = {name: str(tmp_path / name) for name in models}
    other = compiled.executor(base, saved, is_own=True)
    for name, (model, _) in models.items():
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


OF_TWO_MODULES = [
    family.name
    for family in FAMILIES
    if not family.extra
    # Experts are no module, and Mamba's layers have no attention, or no MLP.
    and "experts" not in str(family.fields)
    and family.model_type not in ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")
]


@pytest.mark.parametrize(
    "name", mostly_slow(OF_TWO_MODULES, "opt", "gpt_neox", "falcon-40b", "mpt", "lfm2")
)
def test_every_family_has_modules_of_bottlenecks(name: str) -> None:
    recipe = {**FIELDS, "variant": "houlsby"}
    program = compiler.compile_program(BY_NAME[name].config(2), recipe)
    modules = tuple(program.base.linear_modules())
    assert len(recipe_from(recipe).bypasses(modules)) == 4  # two in each layer
    compiler.compile_program(BY_NAME[name].config(2), {**FIELDS, "variant": "parallel"})

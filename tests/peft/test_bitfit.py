"""BitFit: all biases of the base, against transformers that trains them and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.biases import biases
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts

FIELDS = {"peft_type": "BITFIT"}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}


def pair(name: str) -> tuple[Any, Any, Executor]:
    """The base, the same with other biases that it trains, and an executor with adapter `a`."""
    base = oracle.random_model(BY_NAME[name].config(2))
    tuned = copy.deepcopy(base).requires_grad_(False)
    executor = compiler.compile(base)
    executor.add_adapter("a", FIELDS)
    ours = executor.training_runner("a").parameters
    theirs = biases(tuned)
    assert ours.keys() == theirs.keys()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in theirs.items():
        parameter.requires_grad_(True)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        ours[path].copy_(parameter.data)
    executor.refresh_adapter("a")
    return base, tuned, executor


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama-biases", "gpt_neox", "starcoder2"])
def test_logits_tokens_and_gradients(name: str) -> None:
    base, tuned, executor = pair(name)
    executor.add_adapter("lora", LORA)
    sequences = prompts((9, 4, 7, 5))
    names = ["a", None, "lora", "a"]
    models = [tuned, base, base, tuned]
    found = executor.logits(sequences, names)
    for logits, sequence, model in zip(found, sequences, models, strict=True):
        assert oracle.relative_error(logits, oracle.logits(model, sequence)) < TOLERANCE
    done = executor.generate(sequences, names, max_new_tokens=8, ignore_eos=True)
    expected = [oracle.greedy(m, s, 8) for m, s in zip(models, sequences, strict=True)]
    assert [list(completion.token_ids) for completion in done] == expected
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    tuned.zero_grad()
    expected_loss, _ = oracle.loss_and_gradients(tuned, sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    largest = max(float(p.grad.norm()) for p in biases(tuned).values())
    for path, parameter in biases(tuned).items():
        ours = runner.parameters[path].grad
        # The key's bias moves all scores of a token alike: its gradient is nothing but rounding.
        scale = max(float(parameter.grad.norm()), 1e-2 * largest)
        assert float((ours - parameter.grad).norm()) < TOLERANCE * scale, path


def test_biases_of_one_sum_have_gradients_of_their_own() -> None:
    """Attention's and the MLP's are added to one sum; batches add to each, and clipping scales."""
    _, _, executor = pair("gpt_neox")
    runner = executor.training_runner("a")
    examples = [Example(s, s) for s in prompts((9, 4))]
    once, twice = [], []
    for found, count in ((once, 1), (twice, 2)):
        for _ in range(count):
            runner.forward_backward(examples, 11)
        for parameter in runner.parameters.values():
            found.append(parameter.grad)
            parameter.grad = None
    assert len({gradient.data_ptr() for gradient in twice}) == len(twice)
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-4, atol=1e-6)


def test_files_and_finetuning(tmp_path: Path) -> None:
    base, _, executor = pair("gpt2")
    data = [Example(s, s) for s in prompts((9, 7))]
    result = executor.finetune(data, "a", max_steps=4, learning_rate=0.02, progress=False)
    assert result.losses[-1] < result.losses[0]
    executor.save_adapter("a", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "BITFIT"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}" for name in biases(base)}
    tuned = copy.deepcopy(base)
    tuned.load_state_dict(
        {key.removeprefix("base_model.model."): t for key, t in tensors.items()}, strict=False
    )
    other = compiler.compile(base, {"b": str(tmp_path)})
    (sequence,) = prompts((9,))
    found = other.logits([sequence], "b")[0]
    assert oracle.relative_error(found, oracle.logits(tuned, sequence)) < TOLERANCE
    missing = {key: tensor for key, tensor in tensors.items() if "ln_f" not in key}
    save_file(missing, tmp_path / "adapter_model.safetensors")
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(AdapterError, match=r"none as the bias of transformer.ln_f, .* \[64\]"):
        other.add_adapter("c", tmp_path)


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="r=8, a field it does not know"):
        recipe_from({**FIELDS, "r": 8})
    executor = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(2)))
    with pytest.raises(AdapterError, match="has no biases; use LoRA"):
        executor.add_adapter("a", FIELDS)

"""Other dtypes than fp32: fp64 agrees to 1e-10, bf16 is as near to fp32 as transformers is."""

from __future__ import annotations

import pytest
import torch

import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_fp64(name: str) -> None:
    """Families whose norms transformers computes in the weights' dtype; RMSNorm it does in fp32."""
    base = oracle.random_model(BY_NAME[name].config(2), torch.float64)
    executor = compiler.compile(base, dtype="float64")
    wrapped = oracle.with_adapter(base, "all-linear", rank=4)
    adapter = executor.add_adapter("a", {"peft_type": "LORA", "r": 4, "lora_alpha": 8,
                                         "target_modules": "all-linear"})  # fmt: skip
    for path, parameter in oracle.lora_parameters(wrapped).items():
        module, _, kind = path.rpartition(".")
        weights = adapter.weights[module]
        parameter.data = parameter.data.double()
        (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
    sequences = prompts((13, 7, 13, 4))
    for logits, sequence in zip(executor.logits(sequences), sequences, strict=True):
        assert logits.dtype == torch.float64
        assert oracle.relative_error(logits, oracle.logits(base, sequence)) < 1e-10
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, expected = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for path, parameter in runner.parameters.items():
        assert (parameter.grad - expected[path]).norm() < 1e-10 * expected[path].norm(), path


@pytest.mark.parametrize(
    "name", ["llama3", "gemma2", "olmo2", "cohere-qk_norm", "gptj", "falcon-7b"]
)
def test_bf16_is_as_close_to_fp32_as_transformers_is(name: str) -> None:
    config = BY_NAME[name].config(2)
    exact = oracle.random_model(config)
    rounded = oracle.random_model(config, torch.bfloat16)
    for parameter, source in zip(exact.parameters(), rounded.parameters(), strict=True):
        parameter.data.copy_(source.data)
    executor = compiler.compile(rounded)
    for sequence in prompts((13, 9)):
        truth = oracle.logits(exact, sequence)
        theirs = oracle.logits(rounded, sequence).float()
        ours = executor.logits(sequence)
        assert ours.dtype == torch.bfloat16
        error = (ours.float() - truth).norm() / truth.norm()
        assert error < 1.25 * (theirs - truth).norm() / truth.norm()

"""Adapters outside the layers: on the head, and on what lies before the first layer."""

from __future__ import annotations

import pytest

import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts

SITES = [
    ("llama3", ("lm_head", "q_proj")),
    ("opt-projected", ("project_out", "fc1")),
    ("opt-projected", ("project_in", "q_proj")),
    ("opt-projected", ("project_in", "project_out", "fc1")),
]


@pytest.mark.parametrize(("name", "targets"), SITES)
@pytest.mark.parametrize("lengths", [(9, 4, 6), (7, 7, 7)], ids=["ragged", "uniform"])
def test_adapters_outside_the_layers_are_served(
    name: str, targets: tuple[str, ...], lengths: tuple[int, ...]
) -> None:
    base = oracle.random_model(BY_NAME[name].config(2))
    wrapped = oracle.with_adapter(base, targets, rank=4)
    executor = compiler.compile(base)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets)}
    adapter = executor.add_adapter("a", fields)
    for path, parameter in oracle.lora_parameters(wrapped).items():
        module, _, kind = path.rpartition(".")
        weights = adapter.weights[module]
        (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
    sequences, names = prompts(lengths), ["a", None, "a"]
    models = [wrapped, base, wrapped]
    found = executor.logits(sequences, names)
    for logits, sequence, model in zip(found, sequences, models, strict=True):
        assert oracle.relative_error(logits, oracle.logits(model, sequence)) < TOLERANCE
    completions = executor.generate(sequences, names, max_new_tokens=8, ignore_eos=True)
    expected = [oracle.greedy(m, s, 8) for m, s in zip(models, sequences, strict=True)]
    assert [list(completion.token_ids) for completion in completions] == expected


def test_an_adapter_before_the_first_layer_is_finetuned() -> None:
    """OPT projects its embeddings where they are narrower than the layers."""
    base = oracle.random_model(BY_NAME["opt-projected"].config(2))
    targets = ("project_in", "q_proj")
    wrapped = oracle.with_adapter(base, targets, rank=4)
    executor = compiler.compile(base)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets)}
    executor.add_adapter("a", fields)
    runner = executor.training_runner("a")
    theirs = oracle.lora_parameters(wrapped)
    assert runner.parameters.keys() == theirs.keys()
    for path, parameter in theirs.items():
        runner.parameters[path].copy_(parameter.data)
    sequences = prompts((9, 4, 6))
    examples = [Example(s, s) for s in sequences]
    loss = runner.forward_backward(examples, runner.count_targets(examples))
    expected_loss, gradients = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    for path, parameter in runner.parameters.items():
        error = (parameter.grad - gradients[path]).norm() / gradients[path].norm()
        assert error < TOLERANCE, path

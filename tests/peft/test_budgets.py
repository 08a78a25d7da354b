"""Every method under a memory budget keeps the bytes that are predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcg.explain import explain as explaining
from pcg.peft.registry import SHORTHANDS, recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.prompts import prompts

LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
METHODS: dict[str, Any] = {
    **{name: name for name in SHORTHANDS},
    "lora with dropout": {**LORA, "lora_dropout": 0.3},
    "dora with dropout": {**LORA, "use_dora": True, "lora_dropout": 0.3},
    "lora with lora_bias": {**LORA, "lora_bias": True},
    "lora with bias": {**LORA, "bias": "all"},
}
FAMILIES = ("llama-biases", "opt", "gpt2")
FAST = ("lora with dropout", "parallel", "prefix")
"""On one family; the others in the slow run."""
CASES = [
    pytest.param(family, method, marks=() if is_fast else pytest.mark.slow)
    for family in FAMILIES
    for method in METHODS
    if not (family == "opt" and method == "bitfit")  # OPT's own test has it, post-norm
    for is_fast in [family == FAMILIES[0] and method in FAST]
]


def gradients(executor: Executor) -> dict[str, torch.Tensor]:
    runner = executor.training_runner("a")
    sequences = prompts((21, 9))
    runner.forward_backward([Example(s, s) for s in sequences], 28, 5)
    found = {name: parameter.grad for name, parameter in runner.parameters.items()}
    assert all(gradient is not None and gradient.any() for gradient in found.values())
    return found


@pytest.mark.parametrize("budget", [0.3])
@pytest.mark.parametrize(("family", "method"), CASES)
def test_what_is_kept_is_predicted(family: str, method: str, budget: float) -> None:
    config = BY_NAME[family].config(3)
    recipe = recipe_from(METHODS[method])
    seq = SEQ + recipe.prompt_tokens  # which go through the layers, too
    options: dict[str, Any] = {"memory_budget": budget, "batch": BATCH, "seq": seq}
    base = oracle.random_model(config, torch.bfloat16)
    executor = compiled.executor(base, {"a": METHODS[method]}, is_own=True, **options)
    report = explaining.explain(base.config.to_dict(), METHODS[method], dtype="bfloat16", **options)
    (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert stage.bytes == measured(executor)

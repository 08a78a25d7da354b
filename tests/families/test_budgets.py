"""Memory budgets: what is kept is what was predicted, and gradients do not depend on it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.explain.report.report import Report
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.families import BY_NAME, FAMILIES, Family
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.prompts import TOLERANCE, prompts

LAYERS = 4
BUDGETS = (0.0, 0.4)
SAMPLE = ("llama3", "opt", "gemma2", "falcon-40b")


def recipe_of(family: Family, targets: str | tuple[str, ...]) -> LoraConfig:
    excluded = tuple(family.excluded) or None
    return LoraConfig(r=4, target_modules=targets, exclude_modules=excluded)


def planned(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], budget: float
) -> tuple[Executor, Report]:
    recipe = recipe_of(family, targets)
    options: dict[str, Any] = {"memory_budget": budget, "batch": BATCH, "seq": SEQ}
    model = oracle.random_model(family.config(LAYERS), dtype)
    executor = compiler.compile(model, {"a": recipe}, **options)
    name = str(dtype).removeprefix("torch.")
    report = explaining.explain(family.config(LAYERS), recipe, dtype=name, **options)
    return executor, report


def check_kept(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], budget: float
) -> None:
    executor, report = planned(family, dtype, targets, budget)
    (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert stage.bytes == measured(executor)
    corners = [point for point in report.pareto if not point.restored]
    assert (stage.recompute_flops_ratio == 0) == (len(corners) == 1)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_budget_keeps_what_is_predicted(name: str, budget: float) -> None:
    check_kept(BY_NAME[name], torch.bfloat16, "all-linear", budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_keeps_what_is_predicted(
    family: Family, dtype: torch.dtype, budget: float
) -> None:
    check_kept(family, dtype, family.usual_targets, budget)


def gradients(executor: Executor, sequences: list[list[int]]) -> dict[str, Tensor]:
    runner = executor.training_runner("a")
    for parameter in runner.parameters.values():
        parameter.grad = None
    targets = sum(len(sequence) - 1 for sequence in sequences)
    runner.forward_backward([Example(s, s) for s in sequences], targets)
    return {name: parameter.grad.clone() for name, parameter in runner.parameters.items()}


def check_gradients(family: Family) -> None:
    base = oracle.random_model(family.config(LAYERS))
    wrapped = oracle.with_adapter(base, "all-linear", rank=4, excluded=family.excluded)
    sequences = prompts((40, 7, 13))
    _, expected = oracle.loss_and_gradients(wrapped, sequences)
    recipe = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        exclude_modules=tuple(family.excluded) or None,
    )
    for budget in (1.0, *BUDGETS):
        executor = compiler.compile(base, {"a": recipe}, memory_budget=budget)
        adapter = executor.adapters["a"]
        for path, parameter in oracle.lora_parameters(wrapped).items():
            module, _, kind = path.rpartition(".")
            weights = adapter.weights[module]
            (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
        found = gradients(executor, sequences)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < TOLERANCE, (budget, name)
        if budget == 1.0:
            first = found
        # What is made again is made by the same operators from the same numbers.
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("name", SAMPLE)
def test_gradients_are_the_same_at_every_budget(name: str) -> None:
    check_gradients(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_gradients_of_every_family_are_the_same_at_every_budget(family: Family) -> None:
    check_gradients(family)


def test_layers_mix_plans() -> None:
    """Between two plans, early layers make more again than late ones, and never the other way."""
    family = BY_NAME["llama3"]
    executor, report = planned(family, torch.float32, "all-linear", 0.5)
    training = executor.program.training
    assert training is not None
    kept = [len(training.plans[index].saved) for index in training.layers[1:]]
    assert kept == sorted(kept)
    assert len(set(kept)) > 1
    sizes = [point.bytes for point in report.pareto]
    ratios = [point.recompute_flops_ratio for point in report.pareto]
    assert all(a > b for a, b in itertools.pairwise(sizes))
    assert all(a < b for a, b in itertools.pairwise(ratios))

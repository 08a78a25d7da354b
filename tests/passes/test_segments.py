"""Layers that share a saved input: which do, what that keeps, and that gradients are the same."""

from __future__ import annotations

import itertools
from math import isqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.explain import explain as explaining
from pcg.explain.report.report import Report
from pcg.ir.program.folder import load_program, save_program
from pcg.ir.types import TOKENS
from pcg.passes.memory.plan import most_shared, shared_inputs
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.families import BY_NAME, Family
from tests.support.measured_memory import BATCH, SEQ, measured

LAYERS = 9


def longest_segment(restored: tuple[int, ...], layers: int) -> int:
    """Layers from one whose input is saved until the next such."""
    marks = "".join("+" if layer in restored else "|" for layer in range(layers))
    return max(len(run) + 1 for run in marks.split("|"))


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.integers(1, 10))
def test_the_longest_segment_is_as_short_as_it_can_be(flags: list[bool], count: int) -> None:
    flags[0] = False
    found = shared_inputs(flags, count)
    candidates = [layer for layer, can_be in enumerate(flags) if can_be]
    longest = [
        longest_segment(chosen, len(flags)) for chosen in itertools.combinations(candidates, count)
    ]
    shortest = min(longest, default=len(flags) + 1)
    if shortest > max(isqrt(len(flags)), 1):
        assert found is None
        return
    assert found is not None
    assert len(found) == count
    assert set(found) <= set(candidates)
    assert longest_segment(found, len(flags)) == shortest


def test_first_layers_share_first() -> None:
    flags = [False] + [True] * 8
    assert shared_inputs(flags, 2) == (1, 3)
    assert shared_inputs(flags, 4) == (1, 3, 5, 7)
    assert shared_inputs(flags, 5) == (1, 2, 4, 5, 7)
    assert most_shared(flags) == (1, 2, 4, 5, 7, 8)


def planned(
    family: Family, budget: float, dropout: float = 0.0, **options: Any
) -> tuple[Executor, Report]:
    recipe = LoraConfig(
        r=4,
        target_modules="all-linear",
        exclude_modules=tuple(family.excluded) or None,
        lora_dropout=dropout,
    )
    options |= {"memory_budget": budget, "batch": BATCH, "seq": SEQ}
    torch.manual_seed(0)
    model = oracle.random_model(family.config(LAYERS))
    executor = compiled.executor(model, {"a": recipe}, is_own=True, **options)
    # The configuration that was compiled, whose trace is cached.
    config = model.config.to_dict()
    return executor, explaining.explain(config, recipe, dtype="float32", **options)


def least_with_an_input_each(family: Family) -> int:
    _, report = planned(family, 0)
    (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
    return stage.bytes


def gradients(executor: Executor) -> dict[str, torch.Tensor]:
    runner = executor.training_runner("a")
    for parameter in runner.parameters.values():
        parameter.grad = None
    examples = [Example(ids, ids) for ids in ([5, 4, 3, 9, 11, 2], [7, 1, 12])]
    runner.forward_backward(examples, 7, dropout_seed=3)
    return {name: p.grad.clone() for name, p in runner.parameters.items() if p.grad is not None}


@pytest.mark.parametrize(
    "dropout",
    [pytest.param(0.0, id="plain", marks=pytest.mark.slow), pytest.param(0.3, id="dropout")],
)
@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("opt", "gemma2", "gpt2")),
        pytest.param("falcon-40b", marks=pytest.mark.slow),
    ],
)
def test_less_is_kept_and_gradients_are_equal_to_the_bit(name: str, dropout: float) -> None:
    family = BY_NAME[name]
    least = least_with_an_input_each(family)
    plain, _ = planned(family, 0, dropout)
    inputs = plain.program.base.blocks[0].inputs[0].type
    one = int(inputs.size_bytes.subs(TOKENS, BATCH * SEQ))
    expected = gradients(plain)
    assert len(expected) > LAYERS
    for count in (1, 5, 6):
        executor, report = planned(family, least - count * one + 1, dropout)
        training = executor.program.training
        assert training is not None
        assert len(training.restored) == count
        (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
        assert stage.bytes == least - count * one == measured(executor)
        found = gradients(executor)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_program_folder_says_which_inputs_are_made_again(tmp_path: Path) -> None:
    _, report = planned(BY_NAME["llama3"], 0)
    executor, _ = planned(BY_NAME["llama3"], report.pareto[-1].bytes)
    save_program(executor.program, tmp_path / "program")
    loaded = load_program(tmp_path / "program")
    assert loaded.training is not None
    assert loaded.training.restored == (1, 2, 4, 5, 7, 8)

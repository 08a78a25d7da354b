"""A budget in bytes against the accounts of the plan that it gives, to the byte."""

from __future__ import annotations

import pytest
from peft import LoraConfig

import pcg
from pcg.compiler import compile_program
from pcg.errors import MemoryBudgetError
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.program import Training
from pcg.ir.program.saved_memory import saved_memory
from pcg.ir.types import CONTEXT
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow

BATCH, SEQ = 2, 64


def planned(family: str, target: str, layers: list[int], budget: int) -> Training:
    recipe = LoraConfig(r=4, target_modules=[target], layers_to_transform=layers)
    config = BY_NAME[family].config(3)
    program = compile_program(config, recipe, batch=BATCH, seq=SEQ, memory_budget=budget)
    assert program.training is not None
    return program.training


@pytest.mark.parametrize(
    ("family", "target", "layers"),
    mostly_slow(
        [
            ("llama3", "v_proj", [2]),
            ("llama3", "o_proj", [2]),
            ("llama3", "v_proj", [1, 2]),
            ("gemma3", "o_proj", [2]),
            ("opt", "out_proj", [2]),
        ],
        ("llama3", "o_proj", [2]),
    ),
)
def test_what_layers_share_counts_where_backward_recomputes_with_it(
    family: str, target: str, layers: list[int]
) -> None:
    """A rotary table is read to recompute queries, though no gradient of this layer reads it."""
    recipe = LoraConfig(r=4, target_modules=[target], layers_to_transform=layers)
    report = pcg.explain(BY_NAME[family].config(3), recipe, batch=BATCH, seq=SEQ)
    sizes = [point.bytes for point in report.pareto]
    assert sizes == sorted(sizes, reverse=True)
    for size in sizes:
        training = planned(family, target, layers, size)
        saved = saved_memory(training.model, training).total
        assert saved.subs({SEQUENCES: BATCH, CONTEXT: SEQ}) == size
    with pytest.raises(MemoryBudgetError, match=f"needs for backward, {sizes[-1]} bytes"):
        planned(family, target, layers, sizes[-1] - 1)

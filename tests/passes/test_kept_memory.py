"""Predicted against measured: what pcg's own training program keeps for backward, to the byte."""

from __future__ import annotations

import pytest
import torch

import pcg.compiler as compiler
from pcg.ir.recipe import LoraRecipe
from pcg.runtime.data import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training_runner import _shifted
from tests.families import oracle
from tests.families.families import FAMILIES, Family

BATCH, SEQ = 2, 16
FAST = ("llama3", "gpt2", "falcon-40b")


def measured(executor: Executor) -> int:
    """Bytes of the storages that a forward leaves for backward and the loss, weights apart."""
    runner = executor.training_runner("a")
    examples = [Example([3] * SEQ, [3] * SEQ)] * BATCH
    batch, targets = _shifted(examples, torch.device("cpu"))
    with torch.no_grad():
        _, carried, kept = runner._forward(batch)
    tensors = [x for saved in kept for x in (saved if isinstance(saved, tuple) else (saved,))]
    weights = executor.base_weights
    resident = {
        value.untyped_storage().data_ptr()
        for holder in (weights.prologue, *weights.layers, weights.epilogue)
        for value in vars(holder).values()
        if isinstance(value, torch.Tensor)
    }
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*tensors, *carried, targets]
    }
    return sum(size for pointer, size in storages.items() if pointer not in resident)


def check(family: Family, dtype: torch.dtype, targets: str | tuple[str, ...]) -> None:
    recipe = LoraRecipe(
        rank=4, target_modules=targets, exclude_modules=tuple(family.excluded) or None
    )
    executor = compiler.compile(oracle.random_model(family.config(3), dtype), {"a": recipe})
    name = str(dtype).removeprefix("torch.")
    report = compiler.explain(family.config(3), recipe, batch=BATCH, seq=SEQ, dtype=name)
    (kept,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert kept.bytes == measured(executor)
    # A tensor that two layers share, one's output and the other's input, has two rows.
    rows = [row for row in report.saved if row.decision in ("save", "compress")]
    assert sum(row.bytes * row.layers for row in rows) >= kept.bytes


@pytest.mark.parametrize("name", FAST)
def test_a_family_keeps_what_is_predicted(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    check(family, torch.bfloat16, "all-linear")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_family_keeps_what_is_predicted(family: Family, dtype: torch.dtype) -> None:
    check(family, dtype, family.usual_targets)

"""Predicted against measured: what pcg's own training program keeps for backward, to the byte."""

from __future__ import annotations

import pytest
import torch

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.peft.lora import LoraConfig
from tests.support import oracle
from tests.support.families import BY_NAME, FAMILIES, Family
from tests.support.interpreter import bf16
from tests.support.measured_memory import BATCH, SEQ, measured, peak_error

bf16.install()
FAST = ("llama3", "gpt2", "falcon-40b")


def check(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], backend: str = "torch"
) -> None:
    recipe = LoraConfig(r=4, target_modules=targets, exclude_modules=tuple(family.excluded) or None)
    base = oracle.random_model(family.config(3), dtype)
    executor = compiler.compile(base, {"a": recipe}, backend=backend)
    name = str(dtype).removeprefix("torch.")
    report = explaining.explain(family.config(3), recipe, batch=BATCH, seq=SEQ, dtype=name)
    (kept,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert kept.bytes == measured(executor)
    # A tensor that two layers share, one's output and the other's input, has two rows.
    rows = [row for row in report.saved if row.decision in ("save", "compress")]
    assert sum(row.bytes * row.layers for row in rows) >= kept.bytes


@pytest.mark.parametrize(
    ("name", "dtype", "budget"),
    [
        pytest.param(
            *(name, dtype, budget), marks=() if (place + turn) % 4 == 0 else pytest.mark.slow
        )
        for place, name in enumerate(["llama3", "opt", "gpt_neox", "gemma2"])
        for turn, (dtype, budget) in enumerate(
            [("float32", 0.0), ("bfloat16", 0.5), ("bfloat16", 1.0), ("float32", 1.0)]
        )
    ],
)
def test_the_peak_of_a_step_is_predicted(name: str, dtype: str, budget: float) -> None:
    assert abs(peak_error(BY_NAME[name], dtype, budget)) < 0.03


@pytest.mark.parametrize("size_bytes", [5_000_000, pytest.param(8_000_000, marks=pytest.mark.slow)])
def test_the_peak_of_a_step_whose_layers_share_inputs_is_predicted(size_bytes: int) -> None:
    assert abs(peak_error(BY_NAME["llama3"], "float32", size_bytes, layers=16)) < 0.03


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", FAST)
def test_a_family_keeps_what_is_predicted(name: str, backend: str) -> None:
    check(BY_NAME[name], torch.bfloat16, "all-linear", backend)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_family_keeps_what_is_predicted(family: Family, dtype: torch.dtype) -> None:
    check(family, dtype, family.usual_targets)

"""Predicted against measured: what pcg's own training program keeps for backward, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pcg.compiler as compiler
import pcg.explain.explain as explaining
from pcg.peft.lora import LoraRecipe
from pcg.runtime.executor import Executor
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.training.data import Example
from pcg.runtime.training.training_pass import TrainingPass
from tests.support import oracle
from tests.support.families import BY_NAME, FAMILIES, Family
from tests.support.interpreter import bf16
from tests.support.live_memory import peak_of

bf16.install()
BATCH, SEQ = 2, 16
FAST = ("llama3", "gpt2", "falcon-40b")


def measured(executor: Executor) -> int:
    """Bytes of the storages that a forward leaves for backward and the loss, weights apart."""
    runner = executor.training_runner("a")
    examples = [Example([3] * SEQ, [3] * SEQ)] * BATCH
    whole = TrainingPass(runner, examples, normaliser=1.0)
    window = whole.begin(whole.tokens)
    with torch.no_grad():
        for layer in range(len(runner.training.layers)):
            run_single(whole.layer_requests(layer, window))
    tensors = [x for saved in window.saved for x in saved if x is not None]
    weights = executor.base_weights
    resident = {
        value.untyped_storage().data_ptr()
        for holder in (weights.prologue, *weights.layers, weights.epilogue)
        for value in vars(holder).values()
        if isinstance(value, torch.Tensor)
    }
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*tensors, *window.carried, window.targets]
    }
    return sum(size for pointer, size in storages.items() if pointer not in resident)


def check(
    family: Family, dtype: torch.dtype, targets: str | tuple[str, ...], backend: str = "torch"
) -> None:
    recipe = LoraRecipe(
        rank=4, target_modules=targets, exclude_modules=tuple(family.excluded) or None
    )
    base = oracle.random_model(family.config(3), dtype)
    executor = compiler.compile(base, {"a": recipe}, backend=backend)
    name = str(dtype).removeprefix("torch.")
    report = explaining.explain(family.config(3), recipe, batch=BATCH, seq=SEQ, dtype=name)
    (kept,) = [stage for stage in report.activations if stage.stage == "compressed"]
    assert kept.bytes == measured(executor)
    # A tensor that two layers share, one's output and the other's input, has two rows.
    rows = [row for row in report.saved if row.decision in ("save", "compress")]
    assert sum(row.bytes * row.layers for row in rows) >= kept.bytes


def peak_error(
    family: Family, dtype: str, budget: float, layers: int = 4, **over_ranks: Any
) -> float:
    """Predicted peak of a step by the measured one, less 1."""
    batch, seq = 4, 192
    wide = {"hidden_size": 256, "intermediate_size": 512, "ffn_dim": 512, "head_dim": 64}
    wide |= {"word_embed_proj_dim": 256, "max_position_embeddings": 256}
    config = family.config(layers)
    config |= {key: size for key, size in wide.items() if key in config}
    excluded = tuple(family.excluded) or None
    recipe = LoraRecipe(rank=4, target_modules="all-linear", exclude_modules=excluded)
    options = {"memory_budget": budget, "batch": batch, "seq": seq, **over_ranks}
    model = oracle.random_model(config, getattr(torch, dtype))
    runner = compiler.compile(model, {"a": recipe}, **options).training_runner("a")
    memory = explaining.explain(config, recipe, dtype=dtype, **options).memory_bytes
    examples = [Example([3] * seq, [3] * seq)] * batch

    def two_micro_batches() -> None:
        # The adapters' gradients are there through all of the second.
        for _ in range(2):
            runner.forward_backward(examples, 2 * batch * (seq - 1))

    found = peak_of(two_micro_batches)
    return sum(memory[kind] for kind in ("activations", "workspace", "gradients")) / found - 1


@pytest.mark.parametrize(
    ("dtype", "budget"), [("float32", 1.0), ("float32", 0.0), ("bfloat16", 0.5), ("bfloat16", 1.0)]
)
@pytest.mark.parametrize("name", ["llama3", "opt", "gpt_neox", "gemma2"])
def test_the_peak_of_a_step_is_predicted(name: str, dtype: str, budget: float) -> None:
    assert abs(peak_error(BY_NAME[name], dtype, budget)) < 0.03


@pytest.mark.parametrize("size_bytes", [5_000_000, 8_000_000])
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

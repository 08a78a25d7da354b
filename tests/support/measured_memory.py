"""Bytes that a training step saves and needs, measured while it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.training.runner import training_runner
from pcg.runtime.training.training_pass import TrainingPass
from tests.support import oracle
from tests.support.families import Family
from tests.support.live_memory import peak_of

BATCH, SEQ = 2, 16


def measured(executor: Executor, batch: int = BATCH, seq: int = SEQ) -> int:
    """Bytes of the storages that a forward leaves for backward and the loss, weights apart."""
    runner = training_runner(executor.state, executor.adapters["a"])
    examples = [Example([3] * seq, [3] * seq)] * batch
    whole = TrainingPass(runner, examples, normaliser=1.0)
    window = whole.begin(whole.tokens)
    with torch.no_grad():
        for layer in range(len(runner.training.layers)):
            run_single(whole.layer_requests(layer, window))
    tensors = [x for saved in window.saved.values() for x in saved if x is not None]
    weights = executor.state.weight_store.bind(runner.training.model)
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


def peak_error(
    family: Family,
    dtype: str,
    budget: float,
    layers: int = 4,
    recipe: LoraConfig | None = None,
    **over_ranks: Any,
) -> float:
    """Predicted peak of a step by the measured one, less 1; by default of LoRA on every layer."""
    batch, seq = 4, 192
    wide = {"hidden_size": 256, "intermediate_size": 512, "ffn_dim": 512, "head_dim": 64}
    wide |= {"word_embed_proj_dim": 256, "max_position_embeddings": 256}
    config = family.config(layers)
    config |= {key: size for key, size in wide.items() if key in config}
    excluded = tuple(family.excluded) or None
    recipe = recipe or LoraConfig(r=4, target_modules="all-linear")
    recipe = dataclasses.replace(recipe, exclude_modules=excluded)
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

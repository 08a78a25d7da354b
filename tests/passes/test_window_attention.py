"""Window attention: what windows keep, beside what whole sequences do."""

from __future__ import annotations

import pytest
import torch

import pcg.compiler as compiler
from pcg.ir.recipe import LoraRecipe
from pcg.runtime.batch import Batch
from pcg.runtime.data import Example
from pcg.runtime.executor import Executor
from pcg.runtime.kv_cache import KvCache, kv_types
from pcg.runtime.page_pool import pages_for
from pcg.runtime.training_pass import TrainingPass, Window
from tests.families import oracle
from tests.families.families import BY_NAME

TOKENS = 32


def kept_bytes(executor: Executor, windows: bool) -> int:
    """Of storages that a forward of one sequence leaves for backward, weights and cache apart."""
    runner = executor.training_runner_of(executor.adapters["a"], windows)
    cache = KvCache(kv_types(runner.training.model), pages_for(TOKENS), torch.device("cpu"))
    table = cache.pool.open("sequence")
    cache.pool.extend(table, pages_for(TOKENS))
    held = (cache, [table]) if windows else (None, [])
    whole = TrainingPass(runner, [Example([3] * TOKENS, [3] * TOKENS)], 1.0, None, *held)
    found: list[Window] = []
    end = whole.end
    whole.end = found.append  # type: ignore[method-assign, assignment]
    whole.forward(TOKENS)
    assert end is not None
    weights = runner.weights
    resident = {
        value.untyped_storage().data_ptr()
        for holder in (weights.prologue, *weights.layers, weights.epilogue)
        for value in vars(holder).values()
        if isinstance(value, torch.Tensor)
    }
    (window,) = found
    assert isinstance(window.batch, Batch)
    sizes = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for kept in window.kept
        for x in kept
        if x is not None
    }
    return sum(size for pointer, size in sizes.items() if pointer not in resident)


@pytest.mark.parametrize("name", ["llama3", "opt", "gemma2"])
def test_keys_and_values_are_kept_once(name: str) -> None:
    layers = 3
    family = BY_NAME[name]
    recipe = LoraRecipe(rank=4, target_modules="all-linear")
    model = oracle.random_model(family.config(layers))
    executor = compiler.compile(model, {"a": recipe}, memory_budget=1.0)
    of_token = sum(
        type_.size_bytes / type_.shape[0]
        for pair in kv_types(executor.program.base)
        for type_ in pair
    )
    assert kept_bytes(executor, True) == kept_bytes(executor, False) - TOKENS * int(of_token)

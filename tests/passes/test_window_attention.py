"""Window attention: what windows keep, beside what whole sequences do."""

from __future__ import annotations

import re

import pytest
import torch

from pcg.explain import explain as explaining
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.saved_memory import window_memory
from pcg.ir.types import CONTEXT
from pcg.peft.lora import LoraConfig
from pcg.peft.prefix import PrefixTuningConfig
from pcg.peft.recipe import Recipe
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.batch import Batch
from pcg.runtime.training.runner import TrainingPass, training_runner
from pcg.runtime.training.windows import Window
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow

TOKENS = 32


def kept_bytes(executor: Executor, windows: bool) -> int:
    """Of storages that a forward of one sequence leaves for backward, weights and cache apart."""
    runner = training_runner(executor.state, executor.adapters["a"], windows)
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
        for kept in window.saved.values()
        for x in kept
        if x is not None
    }
    return sum(size for pointer, size in sizes.items() if pointer not in resident)


@pytest.mark.parametrize("name", mostly_slow(["llama3", "opt", "gemma2"], "opt"))
def test_keys_and_values_are_kept_once(name: str) -> None:
    layers = 3
    family = BY_NAME[name]
    recipe = LoraConfig(r=4, target_modules="all-linear")
    model = oracle.random_model(family.config(layers))
    executor = compiled.executor(model, {"a": recipe}, memory_budget=1.0)
    of_token = sum(
        type_.size_bytes / type_.shape[0]
        for pair in kv_types(executor.program.base)
        for type_ in pair
    )
    assert kept_bytes(executor, True) == kept_bytes(executor, False) - TOKENS * int(of_token)


BATCH, SEQ = 2, 16


def held_bytes(executor: Executor, windows: tuple[int, ...]) -> int:
    """Of storages that are there when all windows went forward; weights and cache apart."""
    adapter = executor.adapters["a"]
    runner = training_runner(executor.state, adapter, windows=True)
    length = adapter.prompt_tokens + SEQ
    pages = pages_for(length)
    cache = KvCache(kv_types(runner.training.model), BATCH * pages, torch.device("cpu"))
    tables = [cache.pool.open(f"sequence {i}") for i in range(BATCH)]
    for table in tables:
        cache.pool.extend(table, pages)
    found: list[Window] = []
    whole = TrainingPass(runner, [Example([3] * SEQ, [3] * SEQ)] * BATCH, 1.0, None, cache, tables)
    begin = whole.begin

    def noting(tokens: int) -> Window:
        found.append(begin(tokens))
        return found[-1]

    whole.begin = noting  # type: ignore[method-assign]
    for tokens in windows:
        whole.forward(tokens)
    assert whole.forwarded == whole.tokens == BATCH * length
    weights = runner.weights
    holders = (weights.prologue, *weights.layers, weights.epilogue)
    resident = [x for holder in holders for x in vars(holder).values()]
    resident += [*cache.keys, *cache.values]
    pointers = {x.untyped_storage().data_ptr() for x in resident if isinstance(x, torch.Tensor)}
    ends = [window.batch.states.after for window in found]
    states = [x for boundary in ends if boundary is not None for x in boundary.states.values()]
    held = [
        x
        for window in found
        for x in (
            *(x for kept in window.saved.values() for x in kept),
            *window.gradients,
            *window.carried,
            *window.shared,
            window.targets,
            *states,
        )
        if x is not None
    ]
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(size for pointer, size in sizes.items() if pointer not in pointers)


# In the first layer nothing before the down projection is trained: attention has no backward. One
# product that makes queries, keys and values is kept whole.
@pytest.mark.parametrize(
    ("name", "dtype", "recipe", "windows", "spared_layers"),
    [
        ("llama3", torch.float32, LoraConfig(r=4, target_modules=("down_proj",)), (7, 20, 5), 2),
        ("opt", torch.float32, LoraConfig(r=4, target_modules=("q_proj",)), (16, 16), 3),
        ("gpt2", torch.bfloat16, LoraConfig(r=4, target_modules="all-linear"), (31, 1), 0),
        ("gemma2", torch.bfloat16, PrefixTuningConfig(num_virtual_tokens=4), (9, 31), 3),
    ],
    ids=["llama3", "opt", "gpt2", "gemma2-prefix"],
)
def test_what_windows_keep_is_what_explain_says(
    name: str,
    dtype: torch.dtype,
    recipe: Recipe,
    windows: tuple[int, ...],
    spared_layers: int,
) -> None:
    model = oracle.random_model(BY_NAME[name].config(3), dtype)
    executor = compiled.executor(model, {"a": recipe})
    length = sum(windows) // BATCH
    named = str(dtype).removeprefix("torch.")
    report = explaining.explain(
        model.config.to_dict(),
        recipe,
        batch=BATCH,
        seq=length,
        dtype=named,
        serve_tokens=BATCH * length,
    )
    stages = {stage.stage: stage for stage in report.activations}
    assert stages["token-level"].bytes == held_bytes(executor, windows)
    spared = stages["compressed"].bytes - stages["token-level"].bytes
    assert spared == report.memory_bytes["kv_cache"] * spared_layers // 3


@pytest.mark.parametrize("name", mostly_slow(["lfm2", "qwen3.5", "mamba2", "bamba"], "lfm2"))
def test_states_at_the_ends_of_windows_are_counted(name: str) -> None:
    """Two of three windows end within a sequence, where recurrent layers keep their states."""
    recipe = LoraConfig(r=4, target_modules="all-linear")
    executor = compiled.executor(oracle.random_model(BY_NAME[name].config(2)), {"a": recipe})
    training = training_runner(executor.state, executor.adapters["a"], windows=True).training
    memory = window_memory(training.model, training, ends=2).total
    assert memory.subs({SEQUENCES: BATCH, CONTEXT: SEQ}) == held_bytes(executor, (7, 20, 5))


def test_explain_counts_ends_of_the_longest_windows() -> None:
    """Windows of 4,096 tokens end three times within a sequence of 16,384, and twice within two."""
    config = BY_NAME["lfm2"].config(2, max_position_embeddings=16384)
    recipe = LoraConfig(r=4, target_modules="all-linear")
    one, two = (
        explaining.explain(config, recipe, batch=batch, seq=16384 // batch) for batch in (1, 2)
    )
    more = one.stage("token-level").bytes - two.stage("token-level").bytes
    note = f"counts {more} bytes of recurrent state .* at 3 ends of windows, of 4,096 tokens"
    assert any(re.search(note, text) for text in one.notes)
    assert one.stage("compressed").bytes == two.stage("compressed").bytes

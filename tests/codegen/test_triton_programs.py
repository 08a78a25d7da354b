"""Programs for Triton in the engine, in the interpreter: tokens and adapters are PyTorch's.

Requests of several methods and ranks, decoding beside chunks of prompts, and a job whose windows
share steps with them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import UnsupportedError
from pcg.runtime.data import Example
from pcg.runtime.engine.events import Kind
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.scheduler import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.kv_cache import bytes_of_page, kv_types
from pcg.runtime.sampling_params import SamplingParams
from tests.families import oracle
from tests.families.families import BY_NAME
from tests.families.test_numbers import prompts
from tests.interpreter import bf16

bf16.install()
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "r4": {**LORA, "target_modules": "all-linear"},
    "r20": {**LORA, "r": 20, "target_modules": "all-linear"},
    "bias": {"peft_type": "BITFIT"},
    "ia3": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
}


def executor_of(base: Any, backend: str) -> Executor:
    executor = compiler.compile(base, backend=backend)
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        generator = torch.Generator().manual_seed(seed)
        for tensor in executor.add_adapter(name, recipe, seed=seed).tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return executor


def served(base: Any, backend: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens of requests, and the adapter that a job beside them trained."""
    executor = executor_of(base, backend)
    page_bytes = bytes_of_page(kv_types(executor.serving[0].model))
    engine = executor.engine(Limits(tokens=24, least_chunk=4), kv_cache_bytes=200 * page_bytes)
    data = [Example(ids, ids) for ids in prompts((11, 7))]
    recipe = RECIPES["r4"]
    job = engine.finetune(data, "trained", peft=recipe, max_steps=1, batch_size=2, seed=1)
    for ids, name in zip(prompts((13, 20, 3, 9, 5)), (None, *RECIPES), strict=True):
        adapter = None if name is None else executor.adapters[name]
        # The one without an adapter is drawn, by the same numbers everywhere.
        drawn = {"temperature": 0.7, "top_k": 20, "seed": 5} if name is None else {}
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, **drawn)
        engine.submit(Request(tuple(ids), params, adapter))
    tokens: list[list[int]] = [[] for _ in range(5)]
    while not engine.is_idle:
        for chunk in engine.step():
            assert chunk.token_id is not None
            tokens[chunk.index].append(chunk.token_id)
        engine.check_integrity()
    assert job.error is None
    return tokens, list(executor.adapters["trained"].tensors)


@pytest.mark.parametrize(
    "name",
    [
        "llama-biases",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2.5-windows", "qwen2")),
    ],
)
def test_tokens_and_trained_adapters_are_those_of_pytorch(name: str) -> None:
    base = oracle.random_model(BY_NAME[name].config(2))
    tokens, trained = served(base, "triton")
    expected, theirs = served(base, "torch")
    assert tokens == expected
    for ours, other in zip(trained, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)


def test_sizes_that_kernels_do_not_take_are_left_to_pytorch() -> None:
    """Heads of 12, and rows of LoRA's matrices that are no multiple of 16 bytes."""
    config = BY_NAME["llama-biases"].config(2, hidden_size=36, num_attention_heads=3, head_dim=12)
    base = oracle.random_model({**config, "num_key_value_heads": 1, "intermediate_size": 44})
    sequences, names = prompts((9, 5, 7)), [None, "r4", "r20"]
    found = executor_of(base, "triton").logits(sequences, names)
    expected = executor_of(base, "torch").logits(sequences, names)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_program_for_triton_runs_on_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnsupportedError, match="device is cpu; compile it for PyTorch"):
        compiler.compile(base, backend="triton", device="cpu")
    with pytest.raises(UnsupportedError, match="backend='cuda'; use one of torch, triton"):
        compiler.compile(base, backend="cuda")


def test_adapters_come_and_go_in_pages_of_the_cache() -> None:
    """More adapters than there is room for: each is written anew where it comes to lie."""
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    prompt, params = prompts((5,))[0], SamplingParams(max_new_tokens=2, ignore_eos=True)
    names = [f"a{number}" for number in range(4)]

    def tokens_of(backend: str) -> list[tuple[int, ...]]:
        executor = compiler.compile(base, backend=backend)
        for seed, name in enumerate(names):
            adapter = executor.add_adapter(name, RECIPES["r4"], seed=seed)
            for tensor in adapter.tensors:
                generator = torch.Generator().manual_seed(seed)
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.3)
        page_bytes = bytes_of_page(kv_types(executor.serving[0].model))
        pages = 2 * executor.serving[1].pages_of(executor.adapters["a0"], page_bytes) + 2
        engine = executor.engine(Limits(running=1), kv_cache_bytes=pages * page_bytes)
        for name in (*names, *names):
            engine.submit(Request(tuple(prompt), params, executor.adapters[name]))
        found = {}
        while not engine.is_idle:
            for chunk in engine.step():
                if chunk.completion is not None:
                    found[chunk.index] = tuple(chunk.completion.token_ids)
            engine.check_integrity()
        evicted = [event for event in engine.log if event.kind is Kind.EVICTED]
        assert len(evicted) >= len(names)
        return [found[index] for index in sorted(found)]

    ours = tokens_of("triton")
    assert ours == tokens_of("torch")
    assert ours[: len(names)] == ours[len(names) :]
    assert len(set(ours)) > 1

"""Split execution computes what the undivided executor does: tokens, gradients, adapters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.runner import training_runner
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts
from tests.support.split_base import running_base

LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
METHODS = {
    "lora": LORA,
    "dora": pcg.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "ia3": pcg.IA3Config(),
    "bottleneck": pcg.BottleneckConfig(bottleneck_size=8),
    "prefix": pcg.PrefixTuningConfig(num_virtual_tokens=3),
    "loha": pcg.LoHaConfig(r=2),
    "vera": pcg.VeraConfig(r=4),
}
FAMILIES = {
    "llama3": list(METHODS),
    "gpt2": ["lora", "dora"],
    "llama3.2": ["lora"],
    "qwen2": ["lora"],
    "opt": ["lora"],
    "falcon-7b": ["lora"],
    "gemma2": ["lora"],
}
EXAMPLES = [Example(one, one) for one in prompts([9, 5])]
COUNT = sum(map(len, prompts([9, 5]))) - 2
PROMPTS = prompts([6, 3])


def add(executor: Executor, method: object) -> None:
    """Add an adapter `x` that does something, the same to each executor."""
    adapter = executor.add_adapter("x", method, seed=1)
    generator = torch.Generator().manual_seed(2)
    for tensor in adapter.tensors:
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    executor.refresh_adapter("x")


def outputs(executor: Executor) -> tuple[list[Sequence[int]], dict[str, Any]]:
    """Greedy tokens, and logits, loss and gradients by name."""
    done = executor.generate(PROMPTS, "x", max_new_tokens=4, temperature=0)
    runner = training_runner(executor.state, executor.state.adapter("x"))
    loss = runner.forward_backward(EXAMPLES, COUNT)
    found = {n: p.grad for n, p in runner.parameters.items() if p.grad is not None}
    found |= {"loss": torch.tensor([loss]), "logits": executor.logits(PROMPTS[0], adapter="x")}
    executor.state.remove_adapter("x")
    return [one.token_ids for one in done], found


QUICK = ("llama3", "gpt2")
"""The others run with the slow tests."""


@pytest.mark.parametrize(
    "family",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES],
)
def test_tokens_and_gradients_are_equal(family: str) -> None:
    model = oracle.random_model(BY_NAME[family].config(2))
    whole = compiler.compile(model, verify=False)
    with running_base(whole) as base, base.connect() as split:
        for method in FAMILIES[family]:
            found = []
            for executor in (whole, split):
                add(executor, METHODS[method])
                found.append(outputs(executor))
            (tokens, numbers), (own, theirs) = found
            assert tokens == own, method
            assert numbers.keys() == theirs.keys()
            assert len(numbers) > 2
            for name, expected in numbers.items():
                error = oracle.relative_error(theirs[name], expected)
                assert error < TOLERANCE, (method, name, error)
        assert split.state.weight_store.size_bytes < base.size_bytes / 2  # embeddings and norms


def test_clients_at_once_train_as_if_each_were_alone() -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(2))
    whole = compiler.compile(model, verify=False)
    methods = ["lora", "ia3", "dora"]
    rows = [Example(one, one) for one in prompts([9, 5, 7])]
    expected = {}
    for name in methods:
        whole.add_adapter(name, METHODS[name], seed=3)
        whole.finetune(rows, adapter=name, max_steps=3, batch_size=2, learning_rate=1e-2)
        expected[name] = whole.adapters[name].tensors
    trained: dict[str, Any] = {}
    with running_base(whole, policy="lockstep") as base:
        barrier = threading.Barrier(len(methods))

        def train(name: str) -> None:
            with base.connect(cut="linear") as split:
                split.add_adapter(name, METHODS[name], seed=3)
                barrier.wait(60)
                split.finetune(rows, adapter=name, max_steps=3, batch_size=2, learning_rate=1e-2)
                trained[name] = split.adapters[name].tensors

        threads = [threading.Thread(target=train, args=(name,)) for name in methods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        counts = base.loop.counts
    assert counts.batches < counts.requests  # some were run together
    for name, tensors in expected.items():
        for one, other in zip(tensors, trained[name], strict=True):
            assert oracle.relative_error(other, one) < TOLERANCE


def test_an_engine_of_a_client_serves_and_trains_in_the_same_steps() -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(2))
    whole = compiler.compile(model, verify=False)
    expected = whole.generate(PROMPTS, max_new_tokens=8, temperature=0)
    whole.finetune(
        EXAMPLES, adapter="x", peft=LORA, max_steps=2, batch_size=2, learning_rate=1e-2, seed=3
    )
    options = {"max_steps": 2, "batch_size": 2, "learning_rate": 1e-2, "seed": 3}
    trained = whole.adapters["x"].tensors
    with (
        running_base(whole) as base,
        base.connect(peft={"x": LORA}) as split,
        split.engine(kv_cache_bytes=2**24).start() as engine,
    ):
        job = engine.finetune(EXAMPLES, adapter="y", peft=LORA, **options)
        found = split.generate(PROMPTS, max_new_tokens=8, temperature=0)
        job.wait()
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for one, other in zip(split.adapters["y"].tensors, trained, strict=True):
            assert oracle.relative_error(one, other) < TOLERANCE


def test_the_linear_cut_takes_the_round_trips_that_are_documented() -> None:
    whole = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(2)), verify=False)
    with running_base(whole) as base, base.connect(peft={"x": LORA}, cut="linear") as split:
        moved = split.caller.moved
        before = moved.calls
        split.logits(PROMPTS[0])
        assert moved.calls - before == 2 * 4 + 1
        runner = training_runner(split.state, split.state.adapter("x"))
        before, sent, received = moved.calls, moved.sent_bytes, moved.received_bytes
        runner.forward_backward(EXAMPLES, COUNT)
        assert moved.calls - before == (2 * 4 + 1) + (7 + 4 + 1)
        h, k, f, vocabulary, layers = 64, 32, 96, 128, 2
        outs = (h + 2 * k) + h + 2 * f + h
        forward, back = layers * (3 * h + f), layers * outs - (h + 2 * k)
        tokens = COUNT + 2
        numbers = tokens * (forward + back) + COUNT * (h + vocabulary)
        assert moved.sent_bytes - sent == 4 * numbers
        numbers = tokens * (layers * outs + layers * (6 * h + f) - 3 * h)
        assert moved.received_bytes - received == 4 * (numbers + COUNT * (vocabulary + h))

"""A small model in an engine, its requests and jobs, and their expected results."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts

NEW = 20
LENGTHS = (9, 4, 37, 5, 18, 1)
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
DATA = [Example(s, s) for s in prompts((13, 7, 21, 30))]
OPTIONS: dict[str, Any] = {"max_steps": 3, "batch_size": 2, "learning_rate": 0.01}


@functools.cache
def models() -> tuple[Any, Any]:
    base = oracle.random_model(BY_NAME["llama3"].config(2, max_position_embeddings=128))
    return base, oracle.with_adapter(base, "all-linear", rank=4)


def make_executor(backend: str = "torch", device: str = "cpu") -> Executor:
    """Return a fresh executor of the base with the adapter "a"."""
    base, wrapped = models()
    executor = compiled.executor(base, backend=backend, device=device)
    oracle.copy_lora(executor.add_adapter("a", LORA), wrapped)
    executor.refresh_adapter("a")
    return executor


def poisoned(executor: Executor, value: float) -> Adapter:
    """Add an adapter, and fill it with a value that loading refuses."""
    adapter = executor.add_adapter("bad", LORA)
    for tensor in adapter.tensors:
        tensor.fill_(value)
    executor.refresh_adapter("bad")
    return executor.adapters["bad"]


def make_engine(
    executor: Executor, pages: int = 64, limits: Limits | None = None, **options: Any
) -> Engine:
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    return executor.engine(limits, kv_cache_bytes=pages * page_bytes, **options)


def requests(executor: Executor, lengths: tuple[int, ...], new: int = NEW) -> list[Request]:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    adapters = [executor.adapters["a"], None]
    return [
        Request(tuple(prompt), params, adapters[i % 2]) for i, prompt in enumerate(prompts(lengths))
    ]


def run(engine: Engine, most: int = 2000) -> list[Chunk]:
    """Run an engine until it is idle; return its chunks."""
    chunks: list[Chunk] = []
    for _ in range(most):
        chunks += engine.step()
        engine.check_integrity()
        if engine.is_idle:
            return chunks
    raise AssertionError("the engine never becomes idle")


def ends(chunks: list[Chunk]) -> dict[int, Chunk]:
    """Return the chunk that ended each request, by the request's number."""
    return {chunk.index: chunk for chunk in chunks if chunk.completion is not None}


def serve(engine: Engine, asked: list[Request], every: int = 1) -> list[Completion]:
    """Submit a request every so many steps, and run until the engine is idle."""
    done: dict[int, Completion] = {}
    left, step = list(asked), 0
    while left or not engine.is_idle:
        if left and step % every == 0:
            engine.submit(left.pop(0))
        for chunk in engine.step():
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        engine.check_integrity()
        step += 1
        assert step < 2000
    return [done[index] for index in sorted(done)]


def tokens(done: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in done]


def expected(asked: list[Request]) -> list[list[int]]:
    """Return the greedy tokens of transformers and peft for each request."""
    return [
        _greedy(r.adapter is not None, tuple(r.prompt_ids), r.params.max_new_tokens) for r in asked
    ]


@functools.cache
def _greedy(is_adapted: bool, prompt: tuple[int, ...], new: int) -> list[int]:
    return oracle.greedy(models()[is_adapted], list(prompt), new)


def check_trained(executor: Executor, name: str = "trained", peft: Any = LORA) -> None:
    """Compare the adapter that a job trained with that of the same job without an engine."""
    for ours, alone in zip(executor.adapters[name].tensors, _alone(json.dumps(peft)), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)


@functools.cache
def _alone(peft: str) -> tuple[torch.Tensor, ...]:
    executor = make_executor()
    executor.finetune(DATA, "trained", peft=json.loads(peft), progress=False, **OPTIONS)
    return tuple(executor.adapters["trained"].tensors)

"""A small model in an engine, its requests and jobs, and what they must give."""

from __future__ import annotations

import functools
from typing import Any

import pcg.compiler as compiler
from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts

NEW = 20


LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}


DATA = [Example(s, s) for s in prompts((13, 7, 21, 30))]


OPTIONS: dict[str, Any] = {"max_steps": 3, "batch_size": 2, "learning_rate": 0.01}


@functools.cache
def models() -> tuple[Any, Any]:
    base = oracle.random_model(BY_NAME["llama3"].config(2, max_position_embeddings=128))
    return base, oracle.with_adapter(base, "all-linear", rank=4)


def make_executor(backend: str = "torch", device: str = "cpu") -> Executor:
    base, wrapped = models()
    executor = compiler.compile(base, backend=backend, device=device)
    adapter = executor.add_adapter("a", LORA)
    for path, parameter in oracle.lora_parameters(wrapped).items():
        module, _, kind = path.rpartition(".")
        weights = adapter.weights[module]
        (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
    executor.refresh_adapter("a")
    return executor


def poisoned(executor: Executor, value: float) -> Adapter:
    """Add an adapter, and only then let its weights become what loading would refuse."""
    adapter = executor.add_adapter("bad", LORA)
    for tensor in adapter.tensors:
        tensor.fill_(value)
    executor.refresh_adapter("bad")
    return executor.adapters["bad"]


def make_engine(executor: Executor, pages: int, limits: Limits | None = None) -> Engine:
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    return executor.engine(limits, kv_cache_bytes=pages * page_bytes)


def requests(executor: Executor, lengths: tuple[int, ...], new: int = NEW) -> list[Request]:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    adapters = [executor.adapters["a"], None]
    return [
        Request(tuple(prompt), params, adapters[i % 2]) for i, prompt in enumerate(prompts(lengths))
    ]


def serve(engine: Engine, asked: list[Request], every: int = 1) -> list[Completion]:
    """Submit a request each so many steps, and run until nothing is left."""
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


def expected(asked: list[Request]) -> list[list[int]]:
    base, wrapped = models()
    return [
        oracle.greedy(
            base if r.adapter is None else wrapped, list(r.prompt_ids), r.params.max_new_tokens
        )
        for r in asked
    ]


LENGTHS = (9, 4, 37, 5, 18, 1)

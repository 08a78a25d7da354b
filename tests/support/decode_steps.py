"""Decode steps over a cache of random keys and values, recorded and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.kernels.batch import Span
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.uploads import uploaded_list
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.decode_graphs import DecodeGraphs, Recorder
from tests.support import oracle
from tests.support.families import BY_NAME

RANKS = {"r4": 4, "r20": 20, "r1": 1}
IA3 = {
    "peft_type": "IA3",
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}


def executor_of(layers: int, device: str, family: str = "llama3") -> Executor:
    """A small model with adapters of several ranks, and of other methods."""
    base = oracle.random_model(BY_NAME[family].config(layers))
    executor = compiler.compile(base, backend="triton", device=torch.device(device))
    for name, rank in RANKS.items():
        add_lora(executor, name, rank)
    executor.add_adapter("ia3", IA3)
    executor.add_adapter("prompt", {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3})
    executor.add_adapter("prefix", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3})
    return executor


def add_lora(executor: Executor, name: str, rank: int) -> None:
    """Add an adapter whose B is not zero."""
    recipe: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    adapter = executor.add_adapter(name, recipe | {"target_modules": "all-linear"}, seed=rank)
    for weights in adapter.weights.values():
        drawn = torch.randn(weights.b.shape, generator=torch.Generator().manual_seed(rank))
        weights.b.copy_(drawn)


@dataclass(frozen=True)
class Step:
    """Tokens of a step.

    Attributes:
        ids: of the tokens.
        contexts: tokens before each.
        adapters: name of each one's, or None.
    """

    ids: Sequence[int]
    contexts: Sequence[int]
    adapters: Sequence[str | None]


class Steps:
    """Runs steps of one program both ways, over one cache."""

    def __init__(
        self, executor: Executor, recorder: Recorder | None, pages: int = 60, eager_steps: int = 0
    ) -> None:
        self._executor = executor
        self._device = executor.device
        self.runner = executor.serving.runner
        self.cache = KvCache(kv_types(self.runner.model), pages, self._device, in_pages=True)
        generator = torch.Generator().manual_seed(0)
        for rows in (*self.cache.keys, *self.cache.values):
            rows.copy_(torch.randn(rows.shape, generator=generator))
        # The adapters' rows lie in a memory of their own, which grows as they come.
        self.stacks: Any = executor.serving.tables
        self.graphs = DecodeGraphs(
            self.runner, self.stacks, self.cache, self._device, recorder, eager_steps
        )
        self._random = Random(0)

    def tables(self, contexts: Sequence[int]) -> list[PageTable]:
        """Pages for so many tokens and the next, anywhere in the cache."""
        pages = self._random.sample(range(self.cache.pool.size), self.cache.pool.size)
        tables = []
        for number, context in enumerate(contexts):
            table = PageTable(f"sequence {number}")
            for _ in range(context // PAGE_TOKENS + 1):
                table.take(pages.pop())
            tables.append(table)
        return tables

    def in_order(self, step: Step) -> tuple[list[int], list[int], list[Any]]:
        """Ids, contexts and adapters, which have come into memory, in the order they run."""
        adapters = [None if n is None else self._executor.adapters[n] for n in step.adapters]
        order = self.stacks.order(adapters)
        return (
            [step.ids[i] for i in order],
            [step.contexts[i] for i in order],
            [adapters[i] for i in order],
        )

    def batch(self, ids: Sequence[int], contexts: Sequence[int], tables: list[PageTable]) -> Batch:
        """As it runs without a graph."""
        places = enumerate(zip(contexts, tables, strict=True))
        spans = [Span(i, 1, context, table) for i, (context, table) in places]
        return Batch(uploaded_list(ids, torch.int64, self._device), spans, self.cache)

    def both(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Logits without a graph, and of a graph where one serves the step.

        What is written to the cache is the same both times.
        """
        ids, contexts, adapters = self.in_order(step)
        tables = self.tables(contexts)
        assert self.cache.pages is not None
        before = self.cache.pages.clone()
        bound = self.stacks.bind(adapters, [1] * len(ids))
        expected = self.runner.logits(self.batch(ids, contexts, tables), bound)
        after = self.cache.pages.clone()
        self.cache.pages.copy_(before)
        found = self.graphs.run(ids, contexts, tables, adapters)
        if found is None:
            assert torch.equal(self.cache.pages, before)
            return expected, None
        self.check_pages(after)
        assert torch.equal(found.tokens, found.logits.argmax(-1))
        return expected, found.logits.clone()

    def check_pages(self, expected: Tensor) -> None:
        """Keys and values are these, to rounding."""
        pages = self.cache.pages
        assert pages is not None
        ours, theirs = (x.view(self.cache.keys[0].dtype) for x in (pages, expected))
        # A device sums rooms in another order than batches: by what the largest are, about 15.
        largest = float(theirs.abs().max()) if self._device.type == "cuda" else 1.0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * largest)

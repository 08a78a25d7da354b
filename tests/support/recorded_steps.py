"""Steps over a cache of random keys and values, recorded and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcg.kernels.batch import Span
from pcg.kernels.devices import uploaded_list
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.step_graphs import Recorder, step_graphs
from tests.support import compiled, oracle
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
    executor = compiled.executor(base, backend="triton", device=torch.device(device))
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
    """Sequences of a step.

    Attributes:
        ids: the tokens of each, or its only one.
        contexts: tokens before these.
        adapters: name of each one's, or None.
        read: places of those after which logits are read; None for all.
    """

    ids: Sequence[int | Sequence[int]]
    contexts: Sequence[int]
    adapters: Sequence[str | None]
    read: Sequence[int] | None = None


class Ordered(NamedTuple):
    """What graphs run: ids, tokens of each sequence and before these, its pages and adapter, and
    the places of those that are read."""

    ids: list[int]
    spans: list[tuple[int, int]]
    tables: list[PageTable]
    adapters: list[Any]
    read: list[int]


class Steps:
    """Runs steps of one program both ways, over one cache."""

    def __init__(
        self,
        executor: Executor,
        recorder: Recorder | None,
        pages: int = 60,
        eager_steps: int = 0,
        limits: tuple[int, int] = (256, 256),
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
        graphs = step_graphs(self.runner, self.stacks, self.cache, *limits, None)
        assert graphs is not None
        self.graphs = graphs
        graphs.recorder, graphs.eager_steps = recorder, eager_steps
        self._random = Random(0)

    def tables(self, ends: Sequence[int]) -> list[PageTable]:
        """Pages for so many tokens and the next, anywhere in the cache."""
        pages = self._random.sample(range(self.cache.pool.size), self.cache.pool.size)
        tables = []
        for number, end in enumerate(ends):
            table = PageTable(f"sequence {number}")
            for _ in range(end // PAGE_TOKENS + 1):
                table.append(pages.pop())
            tables.append(table)
        return tables

    def in_order(self, step: Step) -> Ordered:
        """The step, whose adapters have come into memory, in the order that it runs in."""
        adapters = [None if n is None else self._executor.adapters[n] for n in step.adapters]
        order = self.stacks.order(adapters)
        read = range(len(order)) if step.read is None else step.read
        tokens = [[own] if isinstance(own, int) else list(own) for own in step.ids]
        spans = [(len(tokens[i]), step.contexts[i]) for i in order]
        return Ordered(
            [token for i in order for token in tokens[i]],
            spans,
            self.tables([context + length - 1 for length, context in spans]),
            [adapters[i] for i in order],
            [place for place, i in enumerate(order) if i in read],
        )

    def eager(self, ordered: Ordered) -> Tensor:
        """Logits as they are computed without a graph."""
        lengths = [length for length, _ in ordered.spans]
        places = zip(
            accumulate(lengths[:-1], initial=0), ordered.spans, ordered.tables, strict=True
        )
        spans = [Span(start, *own, table) for start, own, table in places]
        batch = Batch(uploaded_list(ordered.ids, torch.int64, self._device), spans, self.cache)
        bound = self.stacks.bind(ordered.adapters, lengths)
        if len(ordered.read) == len(ordered.ids):
            return self.runner.logits(batch, bound)
        of_rows = self.stacks.bind_epilogue([ordered.adapters[place] for place in ordered.read])
        return self.runner.logits(batch, bound, batch.last_tokens(ordered.read), of_rows)

    def both(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Logits without a graph, and of a graph where one serves the step.

        What is written to the cache is the same both times.
        """
        ordered = self.in_order(step)
        assert self.cache.pages is not None
        before = self.cache.pages.clone()
        expected = self.eager(ordered)
        after = self.cache.pages.clone()
        self.cache.pages.copy_(before)
        found = self.graphs.run(*ordered)
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

"""Serving programs that fill a cache, chunk by chunk, and what transformers caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.kernels.batch import Span
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.model.batch import Batch
from tests.support import oracle


def tables_of(cache: KvCache, lengths: Sequence[int]) -> list[PageTable]:
    """Tables for so many tokens each, whose pages are dealt out in turn: none is a run."""
    tables = [cache.pool.open(f"sequence {i}") for i in range(len(lengths))]
    for page in range(pages_for(max(lengths))):
        for table, length in zip(tables, lengths, strict=True):
            cache.pool.extend(table, int(page < pages_for(length)))
    return tables


def rows_of(cached: Tensor) -> Tensor:
    """One layer's keys or values by row, [rows, K, D]."""
    if cached.dim() == 4:
        return cached.transpose(1, 2).flatten(0, 1)
    return cached.transpose(0, 1)


def check_cache(
    base: Any, executor: Executor, sequences: Sequence[list[int]], in_pages: bool
) -> None:
    """Sequences that go through a program in three steps leave what transformers caches of them."""
    runner, adapter_tables = executor.serving.runner, executor.serving.tables
    cache = KvCache(kv_types(runner.model), 20, executor.device, in_pages=in_pages)
    tables = tables_of(cache, [len(sequence) for sequence in sequences])
    for first, last in ((0, 4), (4, 17), (17, 30)):
        ids, spans = list[int](), []
        for sequence, table in zip(sequences, tables, strict=True):
            if own := sequence[first:last]:
                spans.append(Span(len(ids), len(own), first, table))
                ids += own
        batch = Batch(torch.tensor(ids, device=executor.device), spans, cache)
        runner.hidden(batch, adapter_tables.bind([None] * len(spans), [s.length for s in spans]))
    for sequence, table in zip(sequences, tables, strict=True):
        rows = [table.rows(token, token + 1)[0] for token in range(len(sequence))]
        with torch.no_grad():
            theirs = base(torch.tensor([sequence]), use_cache=True)[oracle.CACHE].layers
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            for ours, other in ((keys, theirs[layer].keys), (values, theirs[layer].values)):
                kept = other.shape[2]  # a sliding layer keeps the last alone
                found = rows_of(ours)[rows].transpose(0, 1)[:, -kept:]
                assert oracle.relative_error(found.cpu(), other[0]) < 1e-5

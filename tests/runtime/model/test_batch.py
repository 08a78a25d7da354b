"""A batch's tensors are those of its spans, wherever the sequences' pages lie."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.ir.types import TOKENS, Dim, TensorType
from pcg.kernels.batch import Span
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch

CPU = torch.device("cpu")
ROW = TensorType("f64", (Dim(TOKENS), Dim(1), Dim(1)))


@given(st.data())
def test_positions_rows_and_last_tokens(random: st.DataObject) -> None:
    cache = KvCache([(ROW, ROW)], random.draw(st.integers(1, 30)), CPU)
    pool, tables = cache.pool, list[PageTable]()
    for expected, need, closes in random.draw(
        st.lists(st.tuples(st.sampled_from([0, 4]), st.integers(1, 4), st.booleans()), max_size=12)
    ):
        if need <= pool.free:
            tables.append(pool.open("someone", expected))
            pool.extend(tables[-1], need)
        if closes and len(tables) > 1:
            pool.close(tables.pop(len(tables) // 2))
    spans, total = [], 0
    for table in tables:
        end = random.draw(st.integers(1, table.capacity))
        length = random.draw(st.just(1) | st.integers(1, end))
        virtual = random.draw(st.integers(0, length))
        spans.append(Span(total, length, end - length, table, virtual))
        total += length
    batch = Batch(torch.zeros(total, dtype=torch.long), spans, cache)
    tokens = [(span, span.context + i) for span in spans for i in range(span.length)]
    assert batch.positions.tolist() == [position for _, position in tokens]
    last = batch.last_tokens(range(len(spans)))
    assert last.tolist() == [span.start + span.length - 1 for span in spans]
    for place in range(len(spans)):
        assert torch.equal(batch.last_tokens([place]), last[place : place + 1])
    assert batch.positions.dtype is last.dtype is torch.int64
    virtual_tokens = [(s.start + i, s.context + i) for s in spans for i in range(s.virtual)]
    if virtual_tokens:
        assert batch.virtual_rows is not None
        assert batch.virtual_places is not None
        found = zip(batch.virtual_rows.tolist(), batch.virtual_places.tolist(), strict=True)
        assert list(found) == virtual_tokens
    else:
        assert batch.virtual_rows is None
    assert batch.longer_spans == [span for span in spans if span.length > 1]
    alike = {span.length for span in spans}
    whole = len(alike) == 1 and all(not span.context for span in spans)
    assert batch.uniform_length == (alike.pop() if whole else 0)
    new = torch.arange(1.0, total + 1, dtype=torch.float64).view(-1, 1, 1)
    written = batch.append(new, -new)
    assert written is not None
    expected = torch.zeros(pool.size * PAGE_TOKENS, dtype=torch.float64)
    for i, (span, position) in enumerate(tokens):
        page = span.table.pages[position // PAGE_TOKENS]
        expected[page * PAGE_TOKENS + position % PAGE_TOKENS] = i + 1
    assert torch.equal(written[0].flatten(), expected)
    assert torch.equal(written[1].flatten(), -expected)

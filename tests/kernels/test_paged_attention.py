"""Paged attention's forward against an explicit softmax in fp64, and its machine code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.errors import UnsupportedError
from pcg.kernels.batch import Span
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.triton.attention import paged_attention as launcher
from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows, append
from pcg.kernels.triton.attention.paged_attention import Blocks, paged_attention
from pcg.kernels.triton.attention.work import (
    KEY_BLOCK,
    MOST_SPLITS,
    SPLIT_KEYS,
    TILE_ROWS,
    WHOLE_KEYS,
    AttentionWork,
    WorkCapacity,
)
from tests.support.attention_cases import TOLERANCE, Case, Paged, cases, reference, span, view
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized
from tests.support.parameters import mostly_slow

bf16.install()

CPU = torch.device("cpu")
MIXED = ((1, 70), (40, 50), (1, 0), (20, 0), (3, 64))
"""Decoding, a chunk behind a context, a whole prompt, a few tokens."""
NAMED = {
    "mha": Case(group=1),
    "gqa": Case(group=4, dtype=torch.bfloat16),
    "mqa": Case(kv_heads=1, group=8, dtype=torch.float16),
    "group-7": Case(kv_heads=1, group=7, size=128, value_size=128, dtype=torch.bfloat16),
    "group-71": Case(kv_heads=1, group=71, dtype=torch.bfloat16),
    "head-80": Case(size=80, value_size=80, dtype=torch.bfloat16),
    "head-96": Case(size=96, value_size=96),
    "head-192-128": Case(size=192, value_size=128, dtype=torch.bfloat16),
    "head-256": Case(size=256, value_size=256, dtype=torch.bfloat16),
    "window": Case(window=20, dtype=torch.bfloat16),
    "wide-window": Case(window=75, arena=True),
    "chunk": Case(kv_heads=1, chunk=24),
    "softcap": Case(softcap=2.0),
    "alibi": Case(alibi=True, dtype=torch.bfloat16),
    "sinks": Case(sinks=True),
    "arena": Case(arena=True, dtype=torch.float16),
    "everything": Case(
        kv_heads=1,
        group=3,
        size=80,
        value_size=16,
        window=33,
        softcap=2.0,
        alibi=True,
        sinks=True,
        arena=True,
    ),
    "everything-ahead": Case(
        kv_heads=1,
        group=3,
        size=96,
        value_size=128,
        window=33,
        softcap=2.0,
        alibi=True,
        sinks=True,
        arena=True,
        dtype=torch.float16,
    ),
}


def check(case: Case, shape: Sequence[tuple[int, int]], seed: int = 0) -> None:
    batch = Paged(case, shape, seed)
    work = AttentionWork.build(batch.parts, case.group, torch.device(case.device))
    with sanitized():
        append(batch.k, batch.v, batch.slots, batch.kv)
        out, lse = paged_attention(batch.q, batch.kv, work, case.scoring, keeps=True)
    expected, sums = batch.reference()
    assert out.dtype == case.dtype
    assert lse is not None
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", mostly_slow(NAMED, "mha", "mqa", "window", "chunk", "alibi"))
def test_decode_chunks_and_prompts_in_one_batch(name: str) -> None:
    check(NAMED[name], MIXED if NAMED[name].group < 9 else MIXED[::4])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMED)
def test_on_a_gpu(name: str) -> None:
    case = dataclasses.replace(NAMED[name], device="cuda")
    check(case, MIXED)
    check(case, ((1, 9000), (300, 2000), (1, 500), (130, 0), (2, 4000)))


SHAPES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(0, 200)),
        st.tuples(st.integers(1, 70), st.sampled_from([0, 0, 1, 16, 63, 64, 65, 150])),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=10)
@given(cases(), SHAPES, st.integers(0, 9))
def test_any_batch_of_any_options(case: Case, shape: list[tuple[int, int]], seed: int) -> None:
    check(case, shape, seed)


@pytest.mark.parametrize("window", [0, 300, 700])
def test_a_token_that_decodes_over_many_splits(window: int) -> None:
    check(Case(window=window, sinks=True, dtype=torch.bfloat16), [(1, 4 * SPLIT_KEYS + 100)])


def test_a_token_that_decodes_over_the_splits_of_a_chunk() -> None:
    shape = [(1, 4 * SPLIT_KEYS + 100)]
    check(Case(chunk=SPLIT_KEYS + 150, sinks=True, dtype=torch.bfloat16), shape)


@settings(max_examples=6)
@given(cases(), st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_whole_sequences_without_a_cache(case: Case, lengths: list[int]) -> None:
    q, k, v = case.tensors(sum(lengths))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [span(start, length) for start, length in zip(starts, lengths, strict=True)]
    work = AttentionWork.build(parts, case.group, CPU)
    with sanitized():
        kv = KvRows(CacheRows.of_batch(k), CacheRows.of_batch(v))
        out, lse = paged_attention(q, kv, work, case.scoring)
    assert lse is None
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([reference(*piece, 0, **case.keywords())[0] for piece in pieces])
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_token_gets_the_same_whoever_else_is_there() -> None:
    """To the bit: alone, repeated, and in a batch, in a graph's capacity or not."""
    case = NAMED["gqa"]
    batch = Paged(case, ((1, 540), (40, 30), (1, 20)))
    append(batch.k, batch.v, batch.slots, batch.kv)

    def run(parts: list[Span], capacity: WorkCapacity | None = None) -> torch.Tensor:
        work = AttentionWork.build(parts, case.group, CPU, capacity=capacity)
        with sanitized():
            out, _ = paged_attention(batch.q, batch.kv, work, case.scoring)
        return out

    together = run(batch.parts)
    assert torch.equal(together, run(batch.parts))
    assert torch.equal(together, run(batch.parts, WorkCapacity(4, 50, 3, 5, 3, 0)))
    for part in batch.parts:
        own = slice(part.start, part.start + part.length)
        assert torch.equal(together[own], run([part])[own])


def test_products_ahead_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's order of work against the one of other GPUs; what is unwritten is NaN."""
    batch = Paged(NAMED["everything-ahead"], ((70, 90), (40, 0)))
    append(batch.k, batch.v, batch.slots, batch.kv)
    work = AttentionWork.build(batch.parts, 3, CPU)
    found = []
    for ahead in (True, False):
        cut = Blocks(64, 16, 4, 3, ahead)
        monkeypatch.setattr(launcher, "tile_blocks", lambda *_, cut=cut: cut)
        found.append(paged_attention(batch.q, batch.kv, work, batch.case.scoring, keeps=True))
    assert all(map(torch.equal, *found))


def test_a_batch_larger_than_its_room() -> None:
    parts = Paged(Case(), [(1, 2)] * 3).parts
    with pytest.raises(UnsupportedError, match="needs 3 decodes where there is capacity for 2"):
        AttentionWork.build(parts, 1, CPU, capacity=WorkCapacity(3, 40, 1, 4, 2, 0))
    long = [span(0, 1, WHOLE_KEYS, range(100))]
    with pytest.raises(UnsupportedError, match="more than 1024 keys"):
        AttentionWork.build(long, 1, CPU, capacity=WorkCapacity(4, 100, 1, 4, 4, 0))


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("context", [WHOLE_KEYS - 1, WHOLE_KEYS])
def test_a_token_of_one_split_is_not_reduced(
    context: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it where others of the batch are; sinks weigh as in a reduction."""
    case = Case(window=window, sinks=True, dtype=torch.bfloat16)
    if context < WHOLE_KEYS:
        monkeypatch.delattr(launcher, "reduce_splits")
    check(case, [(1, context), (1, 40)])


def test_how_a_batch_is_cut() -> None:
    pages = range(10**4)
    parts = [
        span(0, 1, 3 * SPLIT_KEYS - 1, pages),
        span(1, 100, 7, pages, origin=40),
        span(101, 1, 10**5, pages),
        span(102, 1),
        span(103, 64, 900, pages),
    ]
    work = AttentionWork.build(parts, 4, CPU)
    assert work.parts.tolist()[1] == [1, 100, 7, 40]
    assert work.pages.shape == (5, 10**4)
    assert not work.capacity.is_whole
    assert work.decodes.tolist() == [[0, 0, 3, 0], [2, 3, MOST_SPLITS, 0]]
    assert work.splits.tolist()[:4] == [[0, 0, 3, 0], [0, 1, 3, 0], [0, 2, 3, 0], [2, 0, 64, 0]]
    assert work.tiles.tolist() == [
        [4, TILE_ROWS, TILE_ROWS, 0],
        [4, 0, TILE_ROWS, 0],
        [1, 3 * TILE_ROWS, 400 - 3 * TILE_ROWS, 0],
        [1, 2 * TILE_ROWS, TILE_ROWS, 0],
        [1, TILE_ROWS, TILE_ROWS, 0],
        [1, 0, TILE_ROWS, 0],
        [3, 0, 4, 0],
    ]
    assert not work.key_blocks.numel()
    trained = AttentionWork.build(parts, 4, CPU, backward=True)
    assert not trained.splits.numel()
    assert sum(rows for _, _, rows, _ in trained.tiles.tolist()) == 4 * 167
    blocks = [item for item in trained.key_blocks.tolist() if item[0] in (1, 4)]
    assert blocks[:2] == [[1, 0, 107, 0], [4, 0, KEY_BLOCK, 0]]
    assert blocks[-1] == [4, 7 * KEY_BLOCK, 964 - 7 * KEY_BLOCK, 0]


def test_padding_tokens_are_not_appended() -> None:
    case = Case()
    batch = Paged(case, [(3, 0)])
    batch.slots[1] = -1
    with sanitized():
        append(batch.k, batch.v, batch.slots, batch.kv)
    base = batch.kv.keys.base
    assert torch.isfinite(base).sum() == 2 * case.kv_heads * case.size
    assert torch.equal(view(batch.kv.keys, int(batch.slots[2])), batch.k[2])


def test_other_heads_are_refused() -> None:
    batch = Paged(Case(size=64, value_size=64), [(3, 0)])
    work = AttentionWork.build(batch.parts, 2, CPU)
    odd = batch.kv._replace(values=dataclasses.replace(batch.kv.values, size=72))
    scoring = Scoring(scale=1.0)
    with pytest.raises(UnsupportedError, match="no heads of 72"):
        paged_attention(batch.q, odd, work, scoring)
    with pytest.raises(UnsupportedError, match="2 KV heads cannot serve 3 heads"):
        paged_attention(batch.q[:, :3], batch.kv, work, scoring)
    with pytest.raises(UnsupportedError, match="a scale above 0, and it is -1"):
        paged_attention(batch.q, batch.kv, work, Scoring(scale=-1.0))
    kv = KvRows(CacheRows.of_batch(batch.k), CacheRows.of_batch(batch.v))
    with pytest.raises(UnsupportedError, match="without pages, but block tables of 16 columns"):
        paged_attention(batch.q, kv, work, scoring)

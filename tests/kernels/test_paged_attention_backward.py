"""Paged attention's backward against torch's autograd of an explicit softmax in fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import KvGradients, Span
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows, append
from pcg.kernels.triton.attention.paged_attention import paged_attention, paged_attention_backward
from pcg.kernels.triton.attention.work import AttentionWork
from tests.support.attention_cases import TOLERANCE, Case, cases, reference, rows_of, span
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized
from tests.support.parameters import mostly_slow

bf16.install()

NAMED = {
    "mha": Case(group=1),
    "gqa": Case(group=4, dtype=torch.bfloat16),
    "mqa": Case(kv_heads=1, group=8, dtype=torch.float16),
    "group-7": Case(kv_heads=1, group=7, size=128, value_size=128, dtype=torch.bfloat16),
    "head-80": Case(kv_heads=1, size=80, value_size=80, dtype=torch.bfloat16),
    "head-192-128": Case(kv_heads=1, size=192, value_size=128, dtype=torch.bfloat16),
    "head-256": Case(kv_heads=1, size=256, value_size=256, dtype=torch.bfloat16),
    "head-256-fp32": Case(kv_heads=1, size=256, value_size=256),
    "window": Case(kv_heads=1, window=9),
    "wide-window": Case(kv_heads=1, window=35),
    "chunk": Case(kv_heads=1, chunk=24),
    "softcap": Case(kv_heads=1, softcap=2.0),
    "alibi": Case(alibi=True, dtype=torch.bfloat16),
    "sinks": Case(kv_heads=1, sinks=True),
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
}


def exact(case: Case, lengths: Sequence[int], qkv: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """Gradients of q, k and v of whole sequences, in fp64."""
    leaves = [x.double().requires_grad_() for x in qkv]
    pieces = zip(*(x.split(list(lengths)) for x in leaves), strict=True)
    outs = [reference(*piece, 0, **case.keywords())[0] for piece in pieces]
    return list(torch.autograd.grad(torch.cat(outs), leaves, dout.double()))


def check_close(case: Case, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Gradients are sums of products that were rounded: their errors are as large as the largest.

    A token that sees no key but its own, or whose gradients cancel, has none of its own size.
    """
    for gradient, exactly in zip(found, wanted, strict=True):
        allowed = TOLERANCE[case.dtype] * max(float(exactly.abs().max()), 1.0)
        torch.testing.assert_close(gradient.double(), exactly, rtol=0.0, atol=allowed)


def upstream(case: Case, tokens: int) -> Tensor:
    """dout."""
    shape = (tokens, case.heads, case.value_size)
    found = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return found.to(case.device, case.dtype)


def check_whole(case: Case, lengths: Sequence[int]) -> None:
    """Sequences without a cache."""
    device = torch.device(case.device)
    qkv = q, k, v = case.tensors(sum(lengths))
    parts = [span(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    work = AttentionWork.build(parts, case.group, device, backward=True)
    kv = KvRows(CacheRows.of_batch(k), CacheRows.of_batch(v))
    with sanitized():
        out, lse = paged_attention(q, kv, work, case.scoring, keeps=True)
        dout = upstream(case, len(q))
        found = [
            paged_attention_backward(dout, out, lse, q, kv, work, case.scoring) for _ in range(2)
        ]
    for once, again in zip(*found, strict=True):
        assert once.dtype == case.dtype
        assert torch.equal(once, again)
    check_close(case, found[0], exact(case, lengths, qkv, dout))


@pytest.mark.parametrize("name", ["gqa", "wide-window", "everything"])
def test_whole_sequences(name: str) -> None:
    check_whole(NAMED[name], (40, 1))


@settings(max_examples=4)
@given(cases(), st.lists(st.integers(1, 40), min_size=1, max_size=2))
def test_whole_sequences_of_any_options(case: Case, lengths: list[int]) -> None:
    check_whole(case, lengths)


def check_windows(case: Case, chunks: Sequence[Sequence[int]], seed: int = 0) -> list[Tensor]:
    """Sequences are trained on window by window: forward from the first, backward from the last.

    Args:
        case: what attention does.
        chunks: lengths of each sequence's parts; window i has everyone's i-th.
        seed: of the page tables.
    Returns:
        dq, dk and dv of all tokens, and the sums of the last two.
    """
    lengths = [sum(parts) for parts in chunks]
    origins = [sum(lengths[:i]) for i in range(len(lengths))]
    device = torch.device(case.device)
    qkv = q, k, v = case.tensors(sum(lengths))
    dout = upstream(case, len(q))
    needed = [-(-length // PAGE_TOKENS) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    kv = case.cache(sum(needed) + 2)
    done = [0] * len(lengths)
    windows = []
    for step in range(max(map(len, chunks))):
        parts: list[Span] = []
        tokens: list[int] = []
        slots: list[int] = []
        for i, lengths_of_parts in enumerate(chunks):
            if step < len(lengths_of_parts):
                length = lengths_of_parts[step]
                pages = tables[i][: -(-(done[i] + length) // PAGE_TOKENS)]
                parts.append(span(len(tokens), length, done[i], pages, origins[i]))
                slots += rows_of(parts[-1])[done[i] :]
                tokens += range(origins[i] + done[i], origins[i] + done[i] + length)
                done[i] += length
        work = AttentionWork.build(parts, case.group, device, backward=True)
        append(k[tokens], v[tokens], torch.tensor(slots, device=device), kv)
        out, lse = paged_attention(q[tokens], kv, work, case.scoring, keeps=True)
        windows.append((tokens, work, out, lse))
    sums = KvGradients(k.transpose(0, 1), v.transpose(0, 1), len(k))
    found = [torch.full_like(x, float("nan")) for x in qkv]
    for tokens, work, out, lse in reversed(windows):
        with sanitized():
            own = paged_attention_backward(
                dout[tokens], out, lse, q[tokens], kv, work, case.scoring, sums
            )
        for whole, part in zip(found, own, strict=True):
            whole[tokens] = part
    wanted = exact(case, lengths, qkv, dout)
    check_close(case, found, wanted)
    check_close(case, (sums.keys, sums.values), wanted[1:])
    return [*found, sums.keys, sums.values]


@pytest.mark.parametrize("name", mostly_slow(NAMED, "everything"))
def test_windows(name: str) -> None:
    check_windows(NAMED[name], [[20, 17, 3], [1, 1]])


def test_windows_of_many_blocks() -> None:
    """Of keys and of rows, some of which are seen whole; the same bits wherever their pages lie."""
    case = Case(kv_heads=1, dtype=torch.bfloat16)
    found = [check_windows(case, [[100, 130], [40]], seed) for seed in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@settings(max_examples=5)
@given(
    cases(),
    st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=3), min_size=1, max_size=2),
    st.integers(0, 9),
)
def test_any_windows_of_any_options(case: Case, chunks: list[list[int]], seed: int) -> None:
    check_windows(case, chunks, seed)


def test_what_a_sliding_window_hides_gets_nothing() -> None:
    """Blocks of keys that no token of the window sees are left alone."""
    check_windows(Case(kv_heads=1, group=1, window=10), [[70, 20]])


def test_lists_and_sums_have_to_fit() -> None:
    case = Case()
    q, k, v = case.tensors(3)
    kv = KvRows(CacheRows.of_batch(k), CacheRows.of_batch(v))
    forward, both = (
        AttentionWork.build([span(0, 3)], case.group, q.device, backward=backward)
        for backward in (False, True)
    )
    out, lse = paged_attention(q, kv, both, case.scoring, keeps=True)
    sums = KvGradients(k.transpose(0, 1), v.transpose(0, 1), 3)
    with pytest.raises(UnsupportedError, match="for forward alone"):
        paged_attention_backward(out, out, lse, q, kv, forward, case.scoring)
    with pytest.raises(UnsupportedError, match="sums are for keys and values in a cache"):
        paged_attention_backward(out, out, lse, q, kv, both, case.scoring, sums)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMED)
def test_on_a_gpu(name: str) -> None:
    case = dataclasses.replace(NAMED[name], device="cuda")
    check_whole(case, (300, 1, 77))
    check_windows(case, [[200, 170, 3], [1, 1], [150]])

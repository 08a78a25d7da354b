"""LoRA that kernels add to what they read of a product: rows, choices, and the stream beside it."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.batch import NO_SLOT, AdapterSlot, LoraRows, TokenSpans
from pcg.kernels.triton import ops
from pcg.kernels.triton.adapters.deferred_lora import MOST_WIDTH, DeferredLora, deferred_rows
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized
from tests.support.interpreter.stand_in import stand_in
from tests.support.interpreter.streams import ORDER

bf16.install()

SIZES = (24, 8, 16)
"""Columns of the outputs with LoRA; one without lies behind the first."""
IN = 40


@triton.jit
def _summands(by_token, s, memory, rows, ranks, matrix, first_rank, first_sum, part_stride, parts,
              out, tokens, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Write d [T, n] as a group's kernel reads it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    in_rows = row < tokens
    inside = in_rows & (column < size)
    found = deferred_rows(
        by_token, s, memory, rows, ranks, matrix, first_rank, first_sum, part_stride, parts,
        row.to(tl.int64), column, in_rows, inside, PARTS,
    )  # fmt: skip
    tl.store(out + row * size + column, found, inside)


def rows_of(ranks: Any, runs: Any, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    """LoRA as rows of an adapter for each slot, and A and Bᵀ of each output and slot.

    `runs` are numbers of neighbouring tokens, and their slot.
    """
    widths = [-(-max(1, *of) // 16) * 16 for of in zip(*ranks, strict=True)]
    count = 2 * len(ranks)
    firsts = [0, *accumulate(count * width for width in widths)]
    rows = torch.zeros(firsts[-1], dtype=torch.int64)
    pieces: list[Tensor] = []
    matrices: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    start = 0
    for j, of_slot in enumerate(ranks):
        for slot, rank in enumerate(of_slot):
            a, b = torch.randn(rank, IN).to(dtype), torch.randn(rank, SIZES[j]).to(dtype)
            matrices[j, slot] = a, b
            for number, matrix in ((j, a), (len(ranks) + j, b)):
                at = firsts[slot] + number * widths[slot]
                rows[at : at + rank] = start + matrix.shape[1] * torch.arange(rank)
                start += matrix.numel()
                pieces.append(matrix.flatten())
    slots = [AdapterSlot(*one) for one in zip(range(3), firsts, widths, strict=False)]
    ends = [*accumulate(length for length, _ in runs)]
    spans = tuple(
        (end - length, length, slots[slot] if slot >= 0 else NO_SLOT)
        for end, (length, slot) in zip(ends, runs, strict=True)
    )
    lora = LoraRows(
        torch.cat(pieces).to(device), rows.to(device), 0,
        torch.tensor(ranks, dtype=torch.int32).to(device), IN, (0, 32, 40), SIZES,
        torch.zeros(0, len(slots)), TokenSpans(spans), {},
    )  # fmt: skip
    return lora, matrices


WEIGHT = SimpleNamespace(group_sizes=(24, 8, 8, 16))
"""A base's joined weight, as far as it is asked."""


def summand(lora: DeferredLora, tokens: int, size: int) -> Tensor:
    out = torch.zeros(tokens, size)
    if lora.pointers is not None:
        _summands[(-(-tokens // 2),)](
            *lora.pointers, *lora.numbers, out, tokens, size,
            ROWS=2, COLUMNS=32, PARTS=lora.parts,
        )  # fmt: skip
    return out


@settings(max_examples=12)
@given(
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 2)), min_size=1, max_size=5),
    ranks=st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_summands_are_those_of_fp64(runs: Any, ranks: Any, dtype: Any, seed: int) -> None:
    """Of neighbours with the same adapter, of none, and of outputs that an adapter has not."""
    torch.manual_seed(seed)
    ranks[0][0] = max(1, ranks[0][0])
    slots = [slot for count, slot in runs for _ in range(count)]
    lora, matrices = rows_of(ranks, runs, dtype)
    x, y = torch.randn(len(slots), IN).to(dtype), torch.randn(len(slots), 56)
    given = [lora, None, None], [None] * 3
    with sanitized():
        begun = ops.begun_lora(x, *given)
        *outputs, first, second, third = ops.with_deferred_lora(begun, y.clone(), WEIGHT)
        found = [summand(d, len(x), n) for d, n in zip((first, second, third), SIZES, strict=True)]
    assert torch.equal(torch.cat(outputs, 1), y)
    for j, own in enumerate(found):
        for token, slot in enumerate(slots):
            a, b = matrices.get((j, slot), (torch.zeros(0, IN), torch.zeros(0, SIZES[j])))
            expected = (x[token].double() @ a.double().t()) @ b.double()
            magnitude = (x[token].double().abs() @ a.double().abs().t()) @ b.double().abs()
            assert ((own[token] - expected).abs() <= 1e-5 * magnitude + 1e-30).all()
    some = torch.tensor([len(slots) - 1, 0])
    assert torch.equal(summand(first[some], 2, SIZES[0]), found[0][some])


def test_many_tokens_have_their_lora_at_once() -> None:
    lora, matrices = rows_of([[4]] * 3, [(17, 0)], torch.float32)
    x, y = torch.randn(17, IN), torch.randn(17, 56)
    *outputs, left, _, _ = ops.with_deferred_lora(
        ops.begun_lora(x, [lora, None, None], [None] * 3), y.clone(), WEIGHT
    )
    assert left.pointers is None
    a, b = matrices[0, 0]
    torch.testing.assert_close(outputs[0], y[:, :24] + x @ a.t() @ b, rtol=1e-4, atol=1e-3)
    few, _ = rows_of([[4]] * 3, [(16, 0)], torch.float32)
    begun = ops.begun_lora(x[:16], [few, None, None], [None] * 3)
    assert begun.left is not None


def test_wide_adapters_have_their_lora_at_once() -> None:
    """A token of many ranks is not waited for by the rows of others."""
    left = []
    for rank in (MOST_WIDTH, MOST_WIDTH + 1):
        lora, matrices = rows_of([[rank, 4]] * 3, [(1, 1), (1, 0)], torch.float32)
        x, y = torch.randn(2, IN), torch.randn(2, 56)
        begun = ops.begun_lora(x, [lora, None, None], [None] * 3)
        outputs = ops.with_deferred_lora(begun, y.clone(), WEIGHT)
        left.append(begun.left is not None)
    assert left == [True, False]
    for token, slot in enumerate((1, 0)):
        a, b = matrices[0, slot]
        expected = y[token, :24] + x[token] @ a.t() @ b
        torch.testing.assert_close(outputs[0][token], expected, rtol=1e-4, atol=1e-3)


def test_without_adapters_nothing_is_left() -> None:
    y = torch.randn(3, 56)
    begun = ops.begun_lora(torch.randn(3, IN), [None] * 3, [None] * 3)
    *outputs, _, _, left = ops.with_deferred_lora(begun, y, WEIGHT)
    assert left.pointers is None
    assert torch.equal(torch.cat(outputs, 1), y)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_shrink_has_a_stream_of_its_own_where_a_step_is_recorded(is_recorded: bool) -> None:
    with stand_in():
        lora, _ = rows_of([[4]] * 3, [(2, 0)], torch.float32, "cuda")
        x, y = torch.randn(2, IN, device="cuda"), torch.randn(2, 56, device="cuda")

        def run() -> tuple[Any, set[int]]:
            before = [len(stream.ran) for stream in ORDER.streams]
            begun = ops.begun_lora(x, [lora, None, None], [None] * 3)
            *_, left, _, _ = ops.with_deferred_lora(begun, y, WEIGHT)
            before += [0] * (len(ORDER.streams) - len(before))
            ran = zip(ORDER.streams, before, strict=True)
            return left, {s.number for s, n in ran if "shrink_kernel" in " ".join(s.ran[n:])}

        expected, eager = run()
        assert eager == {ORDER.current.number}
        if is_recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                main = ORDER.current.number
                left, streams = run()
                whole = left.s.clone()  # waits for the branch, or it is a race
            assert len(streams) == 1
            assert streams.isdisjoint({main, *eager})
            graph.replay()
            own = whole.cpu().view(-1, 16)[:, :4]  # of each token's 16 sums
            torch.testing.assert_close(own, expected.s.cpu().view(-1, 16)[:, :4])

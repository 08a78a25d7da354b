"""Rooms for adapters' rows: what was put in is there, in pages no row lies across two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.peft.adapter import Adapter
from pcg.peft.lora import LoraConfig
from pcg.runtime.adapters.row_allocator import (
    OwnRowAllocator,
    PagedRowAllocator,
    RowAllocator,
    pages_of_rows,
)
from pcg.runtime.memory.pool import PageTable

CPU = torch.device("cpu")
PAGE = 64
"""Elements of a page."""

matrices = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([8, 16, 24, 64])), max_size=6)


def adapter() -> Adapter:
    return Adapter("a", LoraConfig(), {})


def made(shapes: list[tuple[int, int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(memory: Tensor, firsts: list[Tensor], expected: list[Tensor]) -> None:
    for starts, matrix in zip(firsts, expected, strict=True):
        columns = torch.arange(matrix.shape[1])
        assert torch.equal(memory[starts[:, None] + columns], matrix)


def never() -> bool:
    return False


def put(room: RowAllocator, one: Adapter, found: list[Tensor]) -> list[Tensor]:
    firsts = room.reserve(one, [matrix.shape for matrix in found], never, grows=True)
    assert firsts is not None
    room.write(one, found)
    return firsts


@given(every=st.lists(matrices, min_size=1, max_size=4), gone=st.integers(0, 3))
def test_a_room_of_their_own(every: list[list[tuple[int, int]]], gone: int) -> None:
    room = OwnRowAllocator(torch.float32, CPU)
    there = [(adapter(), made(shapes, seed)) for seed, shapes in enumerate(every)]
    firsts = [put(room, one, found) for one, found in there]
    for (one, found), starts in zip(there, firsts, strict=True):
        assert room.holds(one)
        check(room.memory, starts, found)
    one, found = there[gone % len(there)]
    room.drop(one.version)
    assert not room.holds(one)
    check(room.memory, put(room, one, found), found)


def test_a_memory_that_is_in_use_does_not_grow() -> None:
    room = OwnRowAllocator(torch.float32, CPU)
    first, second = adapter(), adapter()
    assert room.reserve(first, [(2, 64)], never, grows=False) is None
    put(room, first, made([(400, 64)], 0))
    memory = room.memory
    assert room.reserve(second, [(400, 64)], never, grows=False) is None
    assert room.memory is memory

    def drop() -> bool:
        room.drop(first.version)
        return True

    assert room.reserve(second, [(400, 64)], drop, grows=False) is not None
    assert not room.holds(first)


@given(every=st.lists(matrices, min_size=1, max_size=4), draw=st.data())
def test_pages(every: list[list[tuple[int, int]]], draw: st.DataObject) -> None:
    needs = [pages_of_rows(shapes, PAGE) for shapes in every]
    order = draw.draw(st.permutations(range(sum(needs) + 2)))
    pages = torch.zeros((len(order), 4 * PAGE), dtype=torch.uint8)
    tables: dict[int, PageTable] = {}
    room = PagedRowAllocator(pages, lambda one: tables[one.version], torch.float32)
    there = []
    for seed, (shapes, need) in enumerate(zip(every, needs, strict=True)):
        one, found = adapter(), made(shapes, seed)
        tables[one.version] = table = PageTable("a")
        table.pages, order = list(order[:need]), order[need:]
        there.append((one, found, put(room, one, found), {*table.pages}))
    for one, found, firsts, own in there:
        assert room.holds(one)
        check(room.memory, firsts, found)
        for starts, matrix in zip(firsts, found, strict=True):
            ends = starts + matrix.shape[1] - 1
            assert torch.equal(starts // PAGE, ends // PAGE)
            assert own.issuperset((starts // PAGE).tolist())
    # Brought again, to whatever pages, it is written again.
    one = there[0][0]
    tables[one.version] = PageTable("a", pages=list(tables[one.version].pages))
    assert not room.holds(one)


def test_a_row_longer_than_a_page_is_refused() -> None:
    assert pages_of_rows([(2, 64), (1, 8)], 64) == 3
    assert pages_of_rows([], 64) == 0
    with pytest.raises(UnsupportedError, match="row of 65 elements is longer than a page"):
        pages_of_rows([(1, 65)], 64)

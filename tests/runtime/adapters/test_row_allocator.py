"""Memory for adapters' images: what was written is where `places` says, whoever came and went."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcg.peft.adapter import Adapter
from pcg.peft.lora import LoraConfig
from pcg.runtime.adapters.row_memory import OwnRowAllocator, PagedRowAllocator, RowAllocator
from pcg.runtime.memory.pool import PageTable

CPU = torch.device("cpu")
PAGE = 64
"""Elements of a page."""


def adapter() -> Adapter:
    return Adapter("a", LoraConfig(), {})


def made(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def check(room: RowAllocator, one: Adapter, image: Tensor) -> None:
    assert torch.equal(room.memory[room.places(one, torch.arange(len(image)))], image)


def never() -> bool:
    return False


def put(room: RowAllocator, one: Adapter, image: Tensor) -> None:
    assert room.reserve(one, len(image), never, grows=True)
    room.write(one, image)


@given(sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=4), gone=st.integers(0, 3))
def test_a_memory_of_their_own(sizes: list[int], gone: int) -> None:
    room = OwnRowAllocator(torch.float32, CPU)
    there = [(adapter(), made(size, seed)) for seed, size in enumerate(sizes)]
    for one, image in there:
        put(room, one, image)
    for one, image in there:
        assert room.holds(one)
        check(room, one, image)
    one, image = there[gone % len(there)]
    room.drop(one.version)
    assert not room.holds(one)
    put(room, one, image)
    check(room, one, image)


def test_a_memory_that_is_in_use_does_not_grow() -> None:
    room = OwnRowAllocator(torch.float32, CPU)
    first, second = adapter(), adapter()
    assert not room.reserve(first, 128, never, grows=False)
    put(room, first, made(25_600, 0))
    memory = room.memory
    assert not room.reserve(second, 25_600, never, grows=False)
    assert room.memory is memory

    def drop() -> bool:
        room.drop(first.version)
        return True

    assert room.reserve(second, 25_600, drop, grows=False)
    assert not room.holds(first)


@given(needs=st.lists(st.integers(0, 6), min_size=1, max_size=4), draw=st.data())
def test_pages(needs: list[int], draw: st.DataObject) -> None:
    order = draw.draw(st.permutations(range(sum(needs) + len(needs))))
    pages = torch.zeros((len(order), 4 * PAGE), dtype=torch.uint8)
    tables: dict[int, PageTable] = {}
    room = PagedRowAllocator(pages, lambda one: tables[one.version], torch.float32)
    there = []
    for seed, need in enumerate(needs):
        one, image = adapter(), made(need * PAGE, seed)
        more = draw.draw(st.integers(0, 1))  # a page for what is not rows
        tables[one.version] = table = PageTable("a")
        table.pages, order = list(order[: need + more]), order[need + more :]
        put(room, one, image)
        there.append((one, image))
    for one, image in there:
        assert room.holds(one)
        check(room, one, image)
        pages_of = room.places(one, torch.arange(len(image))) // PAGE
        assert {*tables[one.version].pages}.issuperset(pages_of.tolist())
    # Brought again, to whatever pages, it is written again.
    one = there[0][0]
    tables[one.version] = PageTable("a", pages=list(tables[one.version].pages))
    assert not room.holds(one)

"""LoRA's rows in one memory: tables point at each adapter's own, whoever came and went."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.batch import AdapterSlot, LoraRows, TokenSpans
from pcg.peft.adapter import Adapter
from pcg.peft.lora import LoraConfig
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.row_memory import (
    OwnRowAllocator,
    PagedRowAllocator,
    RowAllocator,
    RowMemory,
)
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.executor import Executor
from pcg.runtime.memory.pool import PageTable
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16

bf16.install()
RANKS = (1, 4, 8, 20, 33)
CPU = torch.device("cpu")


def executor_with_adapters() -> Executor:
    executor = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(2)), backend="triton")
    for number, rank in enumerate(RANKS * 3):
        targets = "all-linear" if number % 2 else ["q_proj", "v_proj", "down_proj"]
        fields = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        adapter = executor.add_adapter(f"a{number}", {"peft_type": "LORA", **fields}, seed=number)
        for weights in adapter.weights.values():
            weights.b.normal_(generator=torch.Generator().manual_seed(number))
    return executor


EXECUTOR = executor_with_adapters()
ADAPTERS = list(EXECUTOR.adapters.values())
SERVED = ServedWeights(EXECUTOR.state.weight_store.linear(), EXECUTOR.program.base.module_shapes())


def memory() -> RowMemory:
    found = RaggedTables(EXECUTOR.serving.runner.model, SERVED, CPU).lora
    assert found is not None
    return found


def read(rows: LoraRows, matrix: int, output: int, slot: AdapterSlot, size: int) -> Tensor:
    rank = int(rows.ranks[output, slot.number])
    first = slot.first + (rows.first + matrix) * slot.width
    assert rank <= slot.width
    return rows.memory[rows.rows[first : first + rank][:, None] + torch.arange(size)]


def check(lora: RowMemory, adapters: list[Adapter]) -> None:
    for site, rows in lora.bound(TokenSpans(())):
        for adapter in adapters:
            slot = lora.slot(adapter)
            for output, one in enumerate(site.modules):
                module = one.a.source.format(layer=site.layer).rpartition(".")[0]
                weights = adapter.weights.get(module)
                own = read(rows, output, output, slot, site.in_size)
                other = read(rows, len(site.modules) + output, output, slot, one.size)
                if weights is None:
                    assert not len(own)
                    continue
                assert one.b.source.format(layer=site.layer).startswith(module)
                assert torch.equal(own, weights.a)
                torch.testing.assert_close(other, weights.b.t() * 2.0)  # alpha / r


WANTED = st.lists(st.integers(0, len(ADAPTERS) - 1), min_size=1, max_size=6, unique=True)


@settings(max_examples=10)
@given(steps=st.lists(st.tuples(WANTED, WANTED, st.integers(0, len(ADAPTERS) - 1)), max_size=8))
def test_tables_point_at_each_adapters_rows(steps: list[tuple[list[int], list[int], int]]) -> None:
    lora = memory()
    for running, coming, gone in steps:
        adapters = [ADAPTERS[i] for i in running]
        lora.admit(adapters)
        lora.prefetch([ADAPTERS[i] for i in coming])
        check(lora, adapters)
        lora.forget(ADAPTERS[gone])
        check(lora, [one for one in adapters if one is not ADAPTERS[gone]])


def test_who_is_idle_gives_way_before_the_memory_grows() -> None:
    """By turns, the same few at once: what there is stays enough."""
    lora, sizes = memory(), []
    for _ in range(4):
        for first in range(0, len(ADAPTERS), 3):
            lora.admit(ADAPTERS[first : first + 3])
            check(lora, ADAPTERS[first : first + 3])
        lora.prefetch(ADAPTERS[3:9])
        sizes.append(lora.size_bytes)
    assert sizes[3] == sizes[2]


def test_memory_gets_smaller_as_adapters_leave() -> None:
    executor = executor_with_adapters()
    tables: Any = executor.serving.tables
    few, many = ADAPTERS[:2], ADAPTERS[2:]
    tables.order([executor.adapters[one.name] for one in few])
    entries = tables.lora.entries
    tables.order(list(executor.adapters.values()))
    most, layout = tables.lora.size_bytes, tables.layout
    for one in many:
        executor.remove_adapter(one.name)
    assert tables.layout != layout  # so that recorded graphs are not replayed
    assert tables.lora.entries <= entries
    assert tables.lora.size_bytes <= most / 3


# --------------------------------------------------------------------------------------- allocators

PAGE = 64
"""Elements of a page."""


def adapter() -> Adapter:
    return Adapter("a", LoraConfig(), {})


def made(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def never() -> bool:
    return False


def put(room: RowAllocator, one: Adapter, image: Tensor) -> None:
    assert room.reserve(one, len(image), never, grows=True)
    room.write(one, image)


def check_rows(room: RowAllocator, there: list[tuple[Adapter, Tensor]]) -> None:
    """What was written is where `places` says."""
    for one, image in there:
        assert room.holds(one)
        assert torch.equal(room.memory[room.places(one, torch.arange(len(image)))], image)


@given(sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=4), gone=st.integers(0, 3))
def test_a_memory_of_their_own(sizes: list[int], gone: int) -> None:
    room = OwnRowAllocator(torch.float32, CPU)
    there = [(adapter(), made(size, seed)) for seed, size in enumerate(sizes)]
    for one, image in there:
        put(room, one, image)
    check_rows(room, there)
    one, image = there[gone % len(there)]
    room.drop(one.version)
    assert not room.holds(one)
    put(room, one, image)
    check_rows(room, there)


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
    check_rows(room, there)
    for one, image in there:
        pages_of = room.places(one, torch.arange(len(image))) // PAGE
        assert {*tables[one.version].pages}.issuperset(pages_of.tolist())
    # Brought again, to whatever pages, it is written again.
    one = there[0][0]
    tables[one.version] = PageTable("a", pages=list(tables[one.version].pages))
    assert not room.holds(one)

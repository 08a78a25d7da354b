"""The pool of pages: random operations, and where pages lie."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import OutOfMemoryError, PcgError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory import host_memory
from pcg.runtime.memory.free_runs import FreeRuns
from pcg.runtime.memory.host_memory import (
    CAPACITIES,
    KEPT_PRODUCTS,
    FreedMemory,
    bound_shape_caches,
    is_set_by,
)
from pcg.runtime.memory.pool import UNREAD_SHARE, PagePool, PageTable, SharedPages


@given(
    st.integers(0, 40),
    st.lists(
        st.tuples(st.sampled_from(["open", "extend", "extend last", "close"]), st.integers(0, 12))
    ),
)
def test_no_page_is_lost(size: int, operations: list[tuple[str, int]]) -> None:
    pool, tables = PagePool(size), list[PageTable]()
    for what, number in operations:
        held = [list(table.pages) for table in tables]
        if what == "open":
            tables.append(pool.open("someone", number))
            held.append([])
        elif tables and what.startswith("extend"):
            table = tables[number % len(tables)]
            free = pool.free
            if number > free:
                with pytest.raises(OutOfMemoryError, match=f"{free} of {size} are free"):
                    pool.extend(table, number)
            else:
                pool.extend(table, number, last=what == "extend last")
                assert pool.free == free - number
        elif tables:
            held.pop(number % len(tables))
            pool.close(tables.pop(number % len(tables)))
        pool.check_integrity()
        assert pool.free == size - sum(len(table.pages) for table in tables)
        for table, before in zip(tables, held, strict=True):
            assert table.pages[: len(before)] == before
            consecutive = table.pages == list(range(*_ends(table)))
            assert table.is_run == consecutive
            rows = [page * PAGE_TOKENS + i for page in table.pages for i in range(PAGE_TOKENS)]
            assert list(table.rows(0, table.capacity)) == rows


def _ends(table: PageTable) -> tuple[int, int]:
    return (table.pages[0], table.pages[-1] + 1) if table.pages else (0, 0)


# ------------------------------------------------------------------------------------- shared pages

OPERATIONS = ["open", "extend", "share", "adopt", "forget", "close"]


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), max_size=80),
)
def test_no_shared_page_is_lost(size: int, operations: list[tuple[str, int]]) -> None:
    pool, tables = PagePool(size), list[PageTable]()
    findable = set[int]()
    pool.shared.on_reclaim = findable.remove
    for what, number in operations:
        held = [list(table.pages) for table in tables]
        table = tables[number % len(tables)] if tables else None
        if what == "open":
            tables.append(pool.open("someone", number))
        elif what == "forget" and findable:
            page = sorted(findable)[number % len(findable)]
            findable.remove(page)
            pool.forget(page)
        elif table is None:
            continue
        elif what == "extend" and number <= pool.free:
            pool.extend(table, number)
        elif what == "share" and table.shared < len(table.pages):
            findable.add(pool.share(table))
        elif what == "adopt":
            others = sorted(findable - set(table.pages))
            if others:
                pool.adopt(table, others[number % len(others)])
        elif what == "close":
            held.pop(number % len(tables))
            pool.close(tables.pop(number % len(tables)))
        pool.check_integrity()
        assert pool.free == size - len({page for one in tables for page in one.pages})
        assert pool.shared.unread <= size * UNREAD_SHARE
        if what != "adopt":
            for one, before in zip(tables, held, strict=False):
                assert one.pages[: len(before)] == before


def test_the_page_read_least_recently_goes_first() -> None:
    pool = PagePool(12)
    reclaimed: list[int] = []
    pool.shared.on_reclaim = reclaimed.append
    first, second = pool.open("first"), pool.open("second")
    for table in (first, second):
        pool.extend(table, 3)
        for _ in range(3):
            pool.share(table)
    pool.close(second)
    pool.close(first)
    third = pool.open("third")
    pool.adopt(third, 3)
    pool.close(third)
    assert (pool.free, pool.shared.unread) == (12, 6)
    pool.extend(pool.open("fourth"), 6)
    assert reclaimed == []
    # Of a sequence the last first; the page that was read again is the latest of all.
    pool.extend(pool.open("fifth"), 5)
    assert reclaimed == [5, 4, 2, 1, 0]
    pool.check_integrity()


def test_a_page_is_shared_once() -> None:
    shared = SharedPages()
    shared.add(3)
    with pytest.raises(PcgError, match="page 3 is shared already"):
        shared.add(3)


# ---------------------------------------------------------------------------------------- free runs

SIZE = 24


def runs_of(pages: set[int]) -> list[tuple[int, int]]:
    """Start and length of each run, in order."""
    starts = [page for page in sorted(pages) if page - 1 not in pages]
    ends = [page + 1 for page in sorted(pages) if page + 1 not in pages]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


KINDS = st.sampled_from(["add", "take", "take last"])


@given(st.lists(st.tuples(KINDS, st.integers(0, SIZE - 1), st.integers(1, 8))))
def test_runs_are_those_of_a_set(operations: list[tuple[str, int, int]]) -> None:
    free, pages = FreeRuns(), set[int]()
    for kind, place, count in operations:
        if kind == "take last" and pages:
            start, length = runs_of(pages)[-1]
            first, taken = free.take_last(count)
            assert taken == min(count, length)
            assert first + taken == start + length
            pages -= set(range(first, first + taken))
        elif kind == "take" and pages:
            start, length = runs_of(pages)[place % len(runs_of(pages))]
            taken = free.take(start, count)
            assert taken == min(count, length)
            pages -= set(range(start, start + taken))
        else:
            added = set(range(place, min(place + count, SIZE))) - pages
            for start, length in runs_of(added):
                free.add(start, length)
            pages |= added
        assert list(free) == runs_of(pages)
        assert free.pages == len(pages)
        lengths = [length for _, length in free]
        assert free.longest == max(lengths, default=0)
        assert [p for p in range(SIZE) if free.begins(p)] == [start for start, _ in free]
        for wanted in range(1, free.longest + 1):
            best = min((length, start) for start, length in free if length >= wanted)
            assert free.fitting(wanted) == best[1]


# ------------------------------------------------------------ freed memory goes back to the system

ROOT = Path(__file__).parents[3]
STEP = """
import json, sys
sys.path.append("benchmarks")
import finetuning
print(json.dumps(finetuning.resident_step("pcg", 0.0, 2, 256, 4)))
"""
HOLES = 1600


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds of glibc's malloc")
def test_resident_memory_of_a_step_is_as_predicted() -> None:
    """In a fresh process, at a budget of 0: glibc's own thresholds take 2.2 times the prediction.

    The step is small, and code of libraries that it loads is up to a third of its 29 MiB.
    """
    command = [sys.executable, "-c", STEP]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["measured_mib"] == pytest.approx(found["predicted_mib"], rel=0.4)
    # And with the model, the optimizer's states and the packed copies, which explain counts.
    assert found["process_mib"] == pytest.approx(found["explained_mib"], rel=0.15)


@pytest.mark.parametrize(
    ("environment", "is_set"),
    [
        ({}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, True),
    ],
)
def test_thresholds_of_the_environment_stay(environment: dict[str, str], is_set: bool) -> None:
    assert is_set_by(environment) == is_set


@pytest.mark.skipif(host_memory._glibc() is None, reason="glibc 2.33 or newer")
@pytest.mark.parametrize("slack", [host_memory.SLACK, 1.0])
def test_holes_go_back_once_they_are_too_much(slack: float) -> None:
    """Those between blocks that stay are too small for what comes next; none is a mapping."""
    freed = FreedMemory(slack)
    blocks = [torch.ones(2**16, dtype=torch.uint8) for _ in range(HOLES)]
    freed.look()
    full = host_memory._anonymous_bytes()
    del blocks[::2]
    larger = [torch.ones(100_000, dtype=torch.uint8) for _ in range(HOLES // 4)]
    before = host_memory._anonymous_bytes()
    freed.look()
    after = host_memory._anonymous_bytes()
    assert before > full + 20 * 2**20
    assert (after < full + 10 * 2**20) == (slack < 1.0)
    del blocks, larger


# --------------------------------------------------------------------------------- caches of shapes

_GROWTH = """
import ctypes, torch
from transformers import AutoModelForCausalLM, LlamaConfig
import pcg

torch.set_num_threads(1)
libc = ctypes.CDLL(None)

def resident_kib():
    libc.malloc_trim(0)
    with open("/proc/self/statm") as statm:
        fields = statm.read().split()
    return (int(fields[1]) - int(fields[2])) * 4

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
executor = pcg.compile(AutoModelForCausalLM.from_config(config).eval())
executor.logits([1] * 320)
for length in range(1, 60):
    executor.logits([1] * length)
before = resident_kib()
for length in range(60, 160):
    executor.logits([1] * length)
print((resident_kib() - before) / 100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's resident pages")
def test_new_lengths_keep_no_memory() -> None:
    """In a process of its own: torch's and oneDNN's caches take their bounds once."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _GROWTH], capture_output=True, text=True, check=True
    )
    assert float(run.stdout.split()[-1]) < 100  # KiB a length


def test_bounds_of_the_environment_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(CAPACITIES[0], "7")
    monkeypatch.delenv(CAPACITIES[1], raising=False)
    bound_shape_caches()
    assert os.environ[CAPACITIES[0]] == "7"
    assert os.environ[CAPACITIES[1]] == str(KEPT_PRODUCTS)

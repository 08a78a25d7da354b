"""The pool of pages: random operations, and where pages lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import OutOfMemoryError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.free_runs import FreeRuns
from pcg.runtime.memory.pool import UNREAD_SHARE, PagePool, PageTable


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

"""Pages that tables share: random operations, and which page goes when one is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import PcgError
from pcg.runtime.memory.pool import UNREAD_SHARE, PagePool, PageTable, SharedPages

OPERATIONS = ["open", "extend", "share", "adopt", "forget", "close"]


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), max_size=80),
)
def test_no_page_is_lost(size: int, operations: list[tuple[str, int]]) -> None:
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


def test_half_of_the_pages_are_kept() -> None:
    pool = PagePool(8)
    table = pool.open("long")
    pool.extend(table, 7)
    for _ in range(7):
        pool.share(table)
    pool.close(table)
    assert (pool.free, pool.shared.unread) == (8, 4)
    longest = pool.open("run", 4)
    pool.extend(longest, 4)
    assert longest.is_run


def test_a_page_is_shared_once() -> None:
    shared = SharedPages()
    shared.add(3)
    with pytest.raises(PcgError, match="page 3 is shared already"):
        shared.add(3)

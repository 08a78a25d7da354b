"""The pool of pages: random operations, and where pages lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import OutOfMemoryError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.pool import PagePool, PageTable


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


def test_owners_grow_into_their_spare_pages() -> None:
    pool = PagePool(12)
    tables = [pool.open("a", 4), pool.open("b", 4), pool.open("c", 4)]
    for _ in range(4):
        for table in tables:
            pool.extend(table, 1)
    assert [table.pages for table in tables] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_adapters_do_not_come_between() -> None:
    pool = PagePool(12)
    tables = [pool.open(name, 2) for name in ("a", "b", "c")]
    for table in tables:
        pool.extend(pool.open("an adapter"), 1, last=True)
        pool.extend(table, 2)
    assert [table.pages for table in tables] == [[0, 1], [2, 3], [4, 5]]


def test_spare_pages_are_anyones_when_no_other_is_free() -> None:
    pool = PagePool(6)
    first, second = pool.open("first", 5), pool.open("second")
    pool.extend(first, 1)
    pool.extend(second, 3)
    assert not second.is_run
    pool.extend(first, 2)
    assert pool.free == 0
    with pytest.raises(OutOfMemoryError, match="first wants 1 pages of 16 tokens, and 0 of 6"):
        pool.extend(first, 1)
    pool.check_integrity()

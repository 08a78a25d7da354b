"""Tables that a graph reads last as long as it, however many others are made."""

from __future__ import annotations

import weakref

from pcg.kernels.devices import kept_tables, table_cache


class Table:
    """A table of a number."""

    def __init__(self, number: int) -> None:
        self.number = number


@table_cache
def table_of(number: int) -> Table:
    return Table(number)


def test_noted_tables_outlast_the_cache() -> None:
    with kept_tables() as kept:
        there = weakref.ref(table_of(-1))
        assert table_of(-1) is there()
    gone = weakref.ref(table_of(-2))
    for number in range(300):
        table_of(number)
    assert gone() is None
    assert there() is kept[0]
    assert len(kept) == 2

"""Free pages as runs, indexed by their starts, their ends and their lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class FreeRuns:
    """Runs of free pages; adjacent ones are merged."""

    def __init__(self) -> None:
        self.pages = 0
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._in_order: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over start and length of each run, in order."""
        return iter([(start, self._lengths[start]) for start in self._in_order])

    @property
    def longest(self) -> int:
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def free_pages(self) -> set[int]:
        """The pages of all runs, from the index that never names a taken page."""
        return {page for start, n in self._lengths.items() for page in range(start, start + n)}

    def begins(self, page: int) -> bool:
        return page in self._lengths

    def fitting(self, count: int) -> int:
        """Return the start of the first of the shortest runs of at least `count` pages."""
        return self._by_length[bisect_left(self._by_length, (count, 0))][1]

    def take(self, start: int, count: int) -> int:
        """Take up to `count` pages from the start of a run; return their number."""
        length = self._remove(start)
        taken = min(count, length)
        if taken < length:
            self._insert(start + taken, length - taken)
        return taken

    def take_last(self, count: int) -> tuple[int, int]:
        """Take up to `count` pages from the end of the last run; return the first and number."""
        start = self._in_order[-1]
        length = self._remove(start)
        taken = min(count, length)
        if taken < length:
            self._insert(start, length - taken)
        return start + length - taken, taken

    def add(self, start: int, length: int) -> None:
        end = start + length
        if end in self._lengths:
            length += self._remove(end)
        if start in self._starts:
            start = self._starts[start]
            length += self._remove(start)
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        self.pages += length
        self._lengths[start] = length
        self._starts[start + length] = start
        insort(self._by_length, (length, start))
        insort(self._in_order, start)

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        self.pages -= length
        del self._starts[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        del self._in_order[bisect_left(self._in_order, start)]
        return length

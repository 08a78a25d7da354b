"""Unified paging: one pool of fixed pages for the KV cache and for adapters.

A page is room for `PAGE_TOKENS` tokens' keys and values in all layers; an adapter takes as many
pages as its bytes need. Any page serves anyone, so nothing is lost to fragmentation, and a table
says which pages an owner has, in order. Where there is a choice an owner gets pages behind one
another: the pages that it is expected to grow into are its spare ones, which others take only when
no other page is free. Attention reads such a run at one stride, and gathers only where it cannot.

Source: S-LoRA §5.1 (one pool for both), vLLM (tables of blocks). Runs are our own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from pcg.errors import OutOfMemoryError

PAGE_TOKENS = 16
"""Tokens of a page: vLLM's block size."""


@dataclass(eq=False)
class PageTable:
    """The pages of one owner.

    Attributes:
        owner: whose they are, for messages.
        pages: in order.
        spare_start: first page behind the last, or where the first will be.
        spare: pages from there that are kept for it while others are free.
    """

    owner: str
    pages: list[int] = field(default_factory=list)
    spare_start: int = 0
    spare: int = 0
    _breaks: int = 0

    @property
    def is_run(self) -> bool:
        """Whether the pages follow one another."""
        return not self._breaks

    @property
    def first_row(self) -> int:
        """Of a run: the row of its first token."""
        return (self.pages[0] if self.pages else self.spare_start) * PAGE_TOKENS

    @property
    def capacity(self) -> int:
        """Tokens that the pages hold."""
        return len(self.pages) * PAGE_TOKENS

    def row(self, token: int) -> int:
        """Where a token lies in the cache."""
        return self.pages[token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS

    def rows(self, start: int, stop: int) -> range | list[int]:
        """Where tokens lie in the cache; a range where the pages are a run."""
        if self.is_run:
            return range(self.first_row + start, self.first_row + stop)
        return [self.row(token) for token in range(start, stop)]

    def take(self, page: int) -> None:
        """Append a page."""
        if self.pages and page != self.pages[-1] + 1:
            self._breaks += 1
        self.pages.append(page)


class PagePool:
    """Gives out pages.

    Attributes:
        size: pages in all.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []
        self._tables: dict[int, PageTable] = {}
        self._loose = size
        self._spare = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds, spare ones included."""
        return self._loose + self._spare

    def open(self, owner: str, expected: int = 0) -> PageTable:
        """A table without pages.

        Args:
            owner: for messages.
            expected: pages that it will have at most; where so many lie free behind one another
                they become its spare ones.
        """
        table = PageTable(owner)
        self._tables[id(table)] = table
        if expected:
            # The least run that is long enough, so that long ones last; of equals the first.
            fitting = [run for run in self._free if run[1] >= expected]
            if fitting:
                start, length = min(fitting, key=lambda run: (run[1], run[0]))
                self._replace((start, length), (start + expected, length - expected))
                table.spare_start, table.spare = start, expected
                self._spare += expected
        return table

    def extend(self, table: PageTable, count: int) -> None:
        """Give a table pages.

        Raises:
            OutOfMemoryError: so many are not free; nothing has changed.
        """
        own = min(count, table.spare)
        if count - own > self.free - table.spare:
            raise OutOfMemoryError(
                f"{table.owner} wants {count} pages of {PAGE_TOKENS} tokens, and {self.free} of "
                f"{self.size} are free"
            )
        self._take_spare(table, own)
        while count > own:
            own += self._take_free(table, count - own)

    def close(self, table: PageTable) -> None:
        """Give all pages of a table back."""
        del self._tables[id(table)]
        self._give_spare_back(table)
        for start, length in _runs(table.pages):
            self._release(start, length)
        table.pages.clear()
        table._breaks = 0

    def check_integrity(self) -> None:
        """Check that every page is in exactly one place.

        Raises:
            AssertionError: a page is lost, or somewhere twice.
        """
        seen = [page for start, length in self._free for page in range(start, start + length)]
        assert len(seen) == self._loose, f"{self._loose} pages should be loose, not {len(seen)}"
        spare = sum(table.spare for table in self._tables.values())
        assert spare == self._spare, f"{self._spare} pages should be spare, not {spare}"
        for table in self._tables.values():
            seen += table.pages
            seen += range(table.spare_start, table.spare_start + table.spare)
            breaks = sum(b != a + 1 for a, b in zip(table.pages, table.pages[1:], strict=False))
            assert breaks == table._breaks, f"{table.owner} has {breaks} breaks"
        assert sorted(seen) == list(range(self.size)), "a page is lost, or in two places"
        for (start, length), (after, _) in zip(self._free, self._free[1:], strict=False):
            assert start + length < after, "free runs that touch are one"

    # --------------------------------------------------------------------------------------- runs

    def _take_spare(self, table: PageTable, count: int) -> None:
        for _ in range(count):
            table.take(table.spare_start)
            table.spare_start += 1
        table.spare -= count
        self._spare -= count

    def _take_free(self, table: PageTable, count: int) -> int:
        """Take up to so many pages that follow one another; returns how many."""
        if not self._free:
            self._give_spare_back(max(self._tables.values(), key=lambda other: other.spare))
        following = table.pages[-1] + 1 if table.pages else -1
        place = bisect_left(self._free, (following, 0))
        if place < len(self._free) and self._free[place][0] == following:
            start, length = self._free[place]
        else:
            longest = max(length for _, length in self._free)
            enough = min(count, longest)
            start, length = min(
                (run for run in self._free if run[1] >= enough), key=lambda run: (run[1], run[0])
            )
        taken = min(count, length)
        self._replace((start, length), (start + taken, length - taken))
        for page in range(start, start + taken):
            table.take(page)
        return taken

    def _give_spare_back(self, table: PageTable) -> None:
        if table.spare:
            self._release(table.spare_start, table.spare)
            self._spare -= table.spare
            table.spare = 0

    def _replace(self, run: tuple[int, int], rest: tuple[int, int]) -> None:
        """Put what is left of a free run in its place."""
        place = bisect_left(self._free, run)
        self._free[place : place + 1] = [rest] if rest[1] else []
        self._loose -= run[1] - rest[1]

    def _release(self, start: int, length: int) -> None:
        """Make pages free; runs that touch become one."""
        insort(self._free, (start, length))
        self._loose += length
        place = bisect_left(self._free, (start, length))
        for left in (place, place - 1):
            if 0 <= left < len(self._free) - 1:
                (a, n), (b, m) = self._free[left : left + 2]
                if a + n == b:
                    self._free[left : left + 2] = [(a, n + m)]


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """The pages as runs: start and length."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found

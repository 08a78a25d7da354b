"""Unified paging: a common pool of fixed-size pages for the KV cache and adapters.

A page holds `PAGE_TOKENS` tokens' keys and values in all layers; an adapter takes pages for its
bytes. A table lists the pages of an owner in order. Owners get adjacent pages if possible: an
owner's spare pages, for its expected growth, go to other owners only when no other page is free.
Attention reads a run of pages at a fixed stride, and gathers other pages. Pages of adapters are
taken from the end of the pool.

The first pages of a table may be shared: other tables read them, too, and no table writes them. A
shared page without readers is kept for later readers, and counts as free, until another owner needs
it (the least recently read page is reclaimed first), or until half of all pages are unread: free
pages scattered among unread pages would leave no runs.

Source: S-LoRA §5.1 (a common pool), vLLM (block tables, reference counts and a queue of free cached
blocks). Runs are our own.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pcg.errors import OutOfMemoryError, PcgError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.free_runs import FreeRuns


class SharedPages:
    """The shared pages of a pool; `on_reclaim` is called with each reclaimed page."""

    def __init__(self) -> None:
        self.on_reclaim: Callable[[int], None] = lambda page: None
        self._readers: dict[int, int] = {}
        self._unread: OrderedDict[int, None] = OrderedDict()
        self._forgotten: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(self._readers)

    @property
    def unread(self) -> int:
        return len(self._unread)

    def add(self, page: int) -> None:
        if page in self._readers:
            raise PcgError(f"page {page} is shared already")
        self._readers[page] = 1

    def read(self, page: int) -> None:
        self._unread.pop(page, None)
        self._readers[page] += 1

    def leave(self, page: int) -> bool:
        """Remove a reader of a page; return True if the page, already forgotten, is now free."""
        self._readers[page] -= 1
        if self._readers[page]:
            return False
        if page not in self._forgotten:
            self._unread[page] = None
            return False
        self._forgotten.remove(page)
        del self._readers[page]
        return True

    def forget(self, page: int) -> bool:
        """Allow no new readers of a page; return True if the page is free."""
        if self._readers[page]:
            self._forgotten.add(page)
            return False
        del self._unread[page], self._readers[page]
        return True

    def reclaim(self) -> int:
        """Remove and return the least recently read page without readers."""
        page, _ = self._unread.popitem(last=False)
        del self._readers[page]
        self.on_reclaim(page)
        return page

    def clear(self) -> None:
        """Drop all shared pages without calling `on_reclaim`."""
        self._readers.clear()
        self._unread.clear()
        self._forgotten.clear()

    def check_integrity(self, read: Iterable[int]) -> None:
        """Raise an AssertionError if the counts differ from the pages of all tables."""
        counts = dict.fromkeys(self._readers, 0)
        for page in read:
            counts[page] += 1
        assert counts == self._readers, "shared pages have other readers than were counted"
        unread = {page for page, readers in counts.items() if not readers}
        assert unread == set(self._unread), "a page that nobody reads is not among the unread"
        assert self._forgotten <= counts.keys() - unread, "a forgotten page is unread, or not there"


UNREAD_SHARE = 0.5
"""The maximum share of unread pages, so that other pages can form runs."""


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of an owner.

    Attributes:
        shared: number of first pages that other tables may read.
        spare_start: the page after the last page, or the place for the first page.
        spare: number of spare pages from `spare_start`, reserved while other pages are free.
        replaced: number of replaced pages; otherwise pages are only appended.
        run_row: the cache row of the first token if the pages are a run, else -1.
        stop_row: the row after a run and its spare pages.
        slot: the slot of a sequence's recurrent states; -1 for none.
        snapshots: numbers of tokens after which the next step keeps the states, and their slots.
    """

    owner: str
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    spare_start: int = 0
    spare: int = 0
    replaced: int = 0
    run_row: int = 0
    stop_row: int = 0
    slot: int = -1
    snapshots: Sequence[tuple[int, int]] = ()
    _breaks: int = 0

    def place(self) -> None:
        """Recompute the rows, after a change of the pages or the spare pages."""
        first, end = self.spare_start, self.spare_start
        if self.pages:
            first, end = self.pages[0], self.pages[-1] + 1
        if end == self.spare_start:
            end += self.spare
        self.run_row = -1 if self._breaks else first * PAGE_TOKENS
        self.stop_row = end * PAGE_TOKENS

    @property
    def is_run(self) -> bool:
        return not self._breaks

    @property
    def capacity(self) -> int:
        return len(self.pages) * PAGE_TOKENS

    @property
    def reach(self) -> int:
        """Number of pages and spare pages."""
        return len(self.pages) + self.spare

    def rows(self, start: int, stop: int) -> range | list[int]:
        """Return the cache rows of tokens; a range if the pages are a run."""
        if self.run_row >= 0:
            return range(self.run_row + start, self.run_row + stop)
        rows: list[int] = []
        for page in self.pages[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)]:
            rows += range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        skipped = start % PAGE_TOKENS
        return rows[skipped : skipped + stop - start]

    def append(self, page: int) -> None:
        if self.pages and page != self.pages[-1] + 1:
            self._breaks += 1
        self.pages.append(page)
        self.place()

    def replace(self, place: int, page: int) -> int:
        """Replace a page; return the replaced page."""
        near = slice(max(place - 1, 0), place + 2)
        self._breaks -= _breaks(self.pages[near])
        replaced, self.pages[place] = self.pages[place], page
        self._breaks += _breaks(self.pages[near])
        self.replaced += 1
        self.place()
        return replaced


class PagePool:
    """Allocates pages, and slots of recurrent states.

    Attributes:
        on_free: called with the first page and the length of each run of freed pages, before the
            pages can be allocated again.
    """

    def __init__(self, size: int, slots: int = 0) -> None:
        self.size = size
        self.slots = slots
        self._free_slots = list(reversed(range(slots)))
        self.on_free: Callable[[int, int], None] = lambda start, count: None
        self.shared = SharedPages()
        self._free = FreeRuns()
        if size:
            self._free.add(0, size)
        self._tables: dict[int, PageTable] = {}
        # An OrderedDict, as the latest leaves first, which leaves gaps at a dict's end.
        self._keeping: OrderedDict[int, PageTable] = OrderedDict()
        self._spare = 0

    @property
    def free(self) -> int:
        """Number of free pages, including spare and unread pages."""
        return self._free.pages + self._spare + self.shared.unread

    def open(self, owner: str, expected: int = 0) -> PageTable:
        """Open a table without pages, with `expected` spare pages if a run is free."""
        table = PageTable(owner)
        self._tables[id(table)] = table
        if 0 < expected <= self._free.longest:
            start = self._free.fitting(expected)
            self._free.take(start, expected)
            table.spare_start, table.spare = start, expected
            self._spare += expected
            self._keeping[id(table)] = table
        table.place()
        return table

    def take_slot(self, table: PageTable) -> None:
        """Give the table of a sequence a slot, if the model has recurrent states."""
        if self.slots and table.slot < 0:
            table.slot = self._free_slots.pop()

    def extend(self, table: PageTable, count: int, last: bool = False) -> None:
        """Give a table pages; with `last` from the end of the pool, not necessarily as a run.

        Raises:
            OutOfMemoryError: too few pages are free; the table is unchanged.
        """
        taken = min(count, table.spare)
        if count - taken > self.free - table.spare:
            raise OutOfMemoryError(
                f"{table.owner} wants {count} pages of {PAGE_TOKENS} tokens, and {self.free} of "
                f"{self.size} are free"
            )
        if taken:
            for _ in range(taken):
                table.append(table.spare_start)
                table.spare_start += 1
            table.spare -= taken
            self._spare -= taken
            if not table.spare:
                del self._keeping[id(table)]
        while count > taken:
            taken += self._take_free(table, count - taken, last)
        table.place()

    def close(self, table: PageTable) -> None:
        """Free all pages of a table."""
        del self._tables[id(table)]
        if table.slot >= 0:
            self._free_slots.append(table.slot)
            table.slot = -1
        self._give_spare_back(table)
        for start, length in runs_of(table.pages[table.shared :]):
            self._take_back(start, length)
        # Reclaim the last page first, as a page is useless without the pages before it.
        for page in reversed(table.pages[: table.shared]):
            if self.shared.leave(page):
                self._take_back(page)
        while self.shared.unread > self.size * UNREAD_SHARE:
            self._take_back(self.shared.reclaim())
        table.pages.clear()
        table.shared = table._breaks = 0
        table.place()

    def reset(self, kept: Iterable[PageTable]) -> None:
        """Free all pages except those of `kept`, after a failed call."""
        tables = list(kept)
        held = {page for table in tables for page in table.pages}
        used = sorted(set(range(self.size)) - self._free.free_pages - held)
        self.shared.clear()
        self._free, self._spare = FreeRuns(), 0
        self._keeping.clear()
        self._tables = {id(table): table for table in tables}
        taken = {table.slot for table in tables}
        self._free_slots = [slot for slot in reversed(range(self.slots)) if slot not in taken]
        for table in tables:
            table.shared = table.spare = 0
            table._breaks = _breaks(table.pages)
            table.place()
        for start, count in runs_of(used):
            self.on_free(start, count)
        for start, count in runs_of(sorted(set(range(self.size)) - held)):
            self._free.add(start, count)

    # ------------------------------------------------------------------------------------- sharing

    def share(self, table: PageTable) -> int:
        """Share and return a table's first unshared page.

        An owner writes only after its shared pages.
        """
        page = table.pages[table.shared]
        self.shared.add(page)
        table.shared += 1
        return page

    def adopt(self, table: PageTable, page: int) -> None:
        """Let a table read a shared page, in place of its first unshared page if any."""
        self.shared.read(page)
        if table.shared < len(table.pages):
            self._take_back(table.replace(table.shared, page))
        else:
            table.append(page)
        table.shared += 1

    def fork(self, table: PageTable, count: int, owner: str) -> PageTable:
        """Open a table that shares the first pages of another table."""
        forked = self.open(owner)
        for place in range(count):
            if place == table.shared:
                # The page is in no index, so it is free after its last reader.
                self.forget(self.share(table))
            self.adopt(forked, table.pages[place])
        return forked

    def forget(self, page: int) -> None:
        """Stop sharing a page; the page is freed with its last reader."""
        if self.shared.forget(page):
            self._take_back(page)

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page or a slot is lost, or held twice."""
        taken = [table.slot for table in self._tables.values() if table.slot >= 0]
        assert sorted([*taken, *self._free_slots]) == list(range(self.slots)), "a slot is lost"
        seen = [page for start, length in self._free for page in range(start, start + length)]
        loose = self._free.pages
        assert len(seen) == loose, f"{loose} pages should be loose, not {len(seen)}"
        keeping = {key: table for key, table in self._tables.items() if table.spare}
        assert keeping == self._keeping, "a table with spare pages is not among those that keep"
        spare = sum(table.spare for table in keeping.values())
        assert spare == self._spare, f"{self._spare} pages should be spare, not {spare}"
        for table in self._tables.values():
            seen += table.pages[table.shared :]
            seen += range(table.spare_start, table.spare_start + table.spare)
            breaks, rows = _breaks(table.pages), (table.run_row, table.stop_row)
            assert breaks == table._breaks, f"{table.owner} has {breaks} breaks"
            table.place()
            assert rows == (table.run_row, table.stop_row), f"{table.owner} has other rows"
        tables = self._tables.values()
        self.shared.check_integrity(page for t in tables for page in t.pages[: t.shared])
        seen += self.shared
        assert sorted(seen) == list(range(self.size)), "a page is lost, or in two places"
        for (start, length), (after, _) in pairwise(self._free):
            assert start + length < after, "free runs that touch are one"

    def _take_back(self, start: int, count: int = 1) -> None:
        self.on_free(start, count)
        self._free.add(start, count)

    def _take_free(self, table: PageTable, count: int, last: bool) -> int:
        if not self._free.pages and self.shared.unread:
            for _ in range(min(count, self.shared.unread)):
                self._take_back(self.shared.reclaim())
        elif not self._free.pages:
            # The latest table has used the fewest spare pages.
            self._give_spare_back(next(reversed(self._keeping.values())))
        following = table.pages[-1] + 1 if table.pages else None
        if last:
            start, taken = self._free.take_last(count)
        elif following is not None and self._free.begins(following):
            start, taken = following, self._free.take(following, count)
        else:
            start = self._free.fitting(min(count, self._free.longest))
            taken = self._free.take(start, count)
        for page in range(start, start + taken):
            table.append(page)
        return taken

    def _give_spare_back(self, table: PageTable) -> None:
        if table.spare:
            self._free.add(table.spare_start, table.spare)
            self._spare -= table.spare
            table.spare = 0
            del self._keeping[id(table)]
            table.place()


def pages_for(tokens: int) -> int:
    """Return the number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def _breaks(pages: list[int]) -> int:
    return sum(after != before + 1 for before, after in pairwise(pages))


def runs_of(pages: list[int]) -> list[tuple[int, int]]:
    """Return the pages as runs: start and length."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


class Needs:
    """A multiset of numbers of pages with a fast maximum."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._largest_first: list[int] = []

    @property
    def most(self) -> int:
        """The largest number; 0 for an empty multiset."""
        while self._largest_first and -self._largest_first[0] not in self._counts:
            heapq.heappop(self._largest_first)
        return -self._largest_first[0] if self._largest_first else 0

    def add(self, pages: int) -> None:
        if pages not in self._counts:
            heapq.heappush(self._largest_first, -pages)
        self._counts[pages] += 1

    def remove(self, pages: int) -> None:
        self._counts[pages] -= 1
        if not self._counts[pages]:
            del self._counts[pages]

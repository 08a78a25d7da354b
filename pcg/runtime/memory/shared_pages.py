"""Shared pages: pages that several tables may read, with counts of their readers.

A page without readers is kept, so that it may be read again, until another owner needs it; the
least recently read is reclaimed first. Such pages count as free.

Source: vLLM's block pool (reference counts, and a queue of cached blocks that are free).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from pcg.errors import PcgError


class SharedPages:
    """The shared pages of a pool; `on_reclaim` is called with each that another owner gets."""

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
        """Count one more reader of a page."""
        self._unread.pop(page, None)
        self._readers[page] += 1

    def leave(self, page: int) -> bool:
        """Count one reader less of a page; returns True if it is free, because it was forgotten."""
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
        """Allow no new readers of a page; returns True if it is free."""
        if self._readers[page]:
            self._forgotten.add(page)
            return False
        del self._unread[page], self._readers[page]
        return True

    def reclaim(self) -> int:
        """Give up the least recently read page without readers; returns it."""
        page, _ = self._unread.popitem(last=False)
        del self._readers[page]
        self.on_reclaim(page)
        return page

    def clear(self) -> None:
        """Share no page, and tell nobody of those that were shared."""
        self._readers.clear()
        self._unread.clear()
        self._forgotten.clear()

    def check_integrity(self, read: Iterable[int]) -> None:
        """AssertionError: the counts differ from the pages that all tables read."""
        counts = dict.fromkeys(self._readers, 0)
        for page in read:
            counts[page] += 1
        assert counts == self._readers, "shared pages have other readers than were counted"
        unread = {page for page, readers in counts.items() if not readers}
        assert unread == set(self._unread), "a page that nobody reads is not among the unread"
        assert self._forgotten <= counts.keys() - unread, "a forgotten page is unread, or not there"

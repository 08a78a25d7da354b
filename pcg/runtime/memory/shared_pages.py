"""Pages that several tables may read: who reads them is counted, and those unread are kept.

A page that nobody reads any more stays as it is, so that somebody may read it again, until another
owner needs it: the least recently read goes first. Such pages count as free.

Source: vLLM's block pool (reference counts, and a queue of cached blocks that are free).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from pcg.errors import PcgError


class SharedPages:
    """The shared pages of a pool.

    Attributes:
        on_reclaim: is told of an unread page that another owner gets.
    """

    def __init__(self) -> None:
        self.on_reclaim: Callable[[int], None] = lambda page: None
        self._readers: dict[int, int] = {}
        self._unread: OrderedDict[int, None] = OrderedDict()
        self._forgotten: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        """All of them."""
        return iter(self._readers)

    @property
    def unread(self) -> int:
        """How many nobody reads."""
        return len(self._unread)

    def add(self, page: int) -> None:
        """Take in a page that one table reads."""
        if page in self._readers:
            raise PcgError(f"page {page} is shared already")
        self._readers[page] = 1

    def read(self, page: int) -> None:
        """One more table reads a page."""
        self._unread.pop(page, None)
        self._readers[page] += 1

    def leave(self, page: int) -> bool:
        """One table less reads a page; whether it is free now, as nobody will read it again."""
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
        """Nobody may begin to read a page any more; whether it is free now."""
        if self._readers[page]:
            self._forgotten.add(page)
            return False
        del self._unread[page], self._readers[page]
        return True

    def reclaim(self) -> int:
        """Give up the unread page that was read least recently."""
        page, _ = self._unread.popitem(last=False)
        del self._readers[page]
        self.on_reclaim(page)
        return page

    def check_integrity(self, read: Iterable[int]) -> None:
        """AssertionError: the counts are not those of what tables read.

        Args:
            read: shared pages of all tables, each as often as it is read.
        """
        counts = dict.fromkeys(self._readers, 0)
        for page in read:
            counts[page] += 1
        assert counts == self._readers, "shared pages have other readers than were counted"
        unread = {page for page, readers in counts.items() if not readers}
        assert unread == set(self._unread), "a page that nobody reads is not among the unread"
        assert self._forgotten <= counts.keys() - unread, "a forgotten page is unread, or not there"

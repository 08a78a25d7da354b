"""Room in the pool: the pages that sequences and their adapters need, and get."""

from __future__ import annotations

from collections.abc import Iterable

from pcg.runtime.adapters.cache import AdapterCache, ServedAdapter
from pcg.runtime.memory.pool import PagePool, pages_for
from pcg.runtime.requests.sequence import Sequence


class PageRoom:
    """Gives sequences pages for their tokens, in the pool that adapters share."""

    def __init__(self, pool: PagePool, adapters: AdapterCache) -> None:
        self.pool = pool
        self.adapters = adapters

    def most_of(self, sequence: Sequence) -> int:
        """Count the pages that a sequence and its adapter need at most."""
        return sequence.most_pages + self.adapters.pages_of(sequence.request.adapter)

    def holds(self, sequence: Sequence, running: int) -> bool:
        """Return True if there are pages for a waiting sequence and its adapter.

        One free page for each of the `running` sequences keeps the newcomer from being preempted
        next.
        """
        adapter = sequence.request.adapter
        need = self._missing(sequence) + running
        if not self.adapters.has(adapter):
            need += self.adapters.pages_of(adapter)
        return need <= self.pool.free + self.adapters.idle_pages

    def give(self, sequence: Sequence, running: int, expected: int) -> bool:
        """Give a sequence its adapter, and pages for its tokens; False without room.

        Args:
            expected: the pages to keep for it while others are free.
        """
        adapter = sequence.request.adapter
        if not self.holds(sequence, running):
            return False
        if adapter is not None and not self.adapters.bring(adapter):
            return False
        self.adapters.use(adapter)
        need = self._missing(sequence)
        if not self.adapters.make_room(need):
            self.adapters.release(adapter)
            return False
        if sequence.table is None:
            sequence.table = self.pool.open(sequence.id, expected)
        self.pool.extend(sequence.table, need)
        return True

    def take_back(self, sequence: Sequence) -> None:
        """Take the pages of a sequence, and discard its cached tokens."""
        if sequence.table is not None:
            self.pool.close(sequence.table)
            sequence.table = None
        sequence.forget_cached()

    def bring_ahead(self, in_turn: Iterable[Sequence], running: int) -> list[ServedAdapter]:
        """Page in the adapters of the next requests that there will be room for; returns them."""
        wanted: dict[int, ServedAdapter] = {}
        room = self.pool.free + self.adapters.idle_pages - running
        for sequence in in_turn:
            adapter = sequence.request.adapter
            is_new = adapter is not None and adapter.version not in wanted
            room -= pages_for(sequence.length)
            room -= self.adapters.pages_of(adapter) if is_new else 0
            if room < 0:
                break
            if adapter is not None and is_new:
                self.adapters.bring(adapter)
                wanted[adapter.version] = adapter
        return list(wanted.values())

    @staticmethod
    def _missing(sequence: Sequence) -> int:
        held = 0 if sequence.table is None else len(sequence.table.pages)
        return pages_for(sequence.length) - held

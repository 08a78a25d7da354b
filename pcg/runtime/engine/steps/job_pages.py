"""Job pages: the pages of the KV cache that jobs hold, at most so many together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pcg.errors import OutOfMemoryError
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.training.work_units import Pages


class JobPages:
    """Gives pages of the pool to jobs.

    Attributes:
        most: how many all jobs may hold.
    """

    def __init__(self, scheduler: Scheduler, most: int) -> None:
        self.most = most
        self._is_shut = False
        self._scheduler = scheduler
        self._held = 0

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Give none meanwhile: what was freed just now may be written by a forward that runs."""
        self._is_shut = True
        try:
            yield
        finally:
            self._is_shut = False

    def open(self, name: str, unit: Pages) -> tuple[PageTable, ...] | None:
        """Return the pages that a job asks for; None while there is no room.

        OutOfMemoryError: there will never be.
        """
        needs = [pages_for(count) for count in unit.tokens]
        total = sum(needs)
        if total > self.most:
            raise OutOfMemoryError(
                f"a batch of job {name!r} needs {total} pages of the KV cache, and finetuning may "
                f"hold {self.most}; lower batch_size, or give the engine more memory"
            )
        scheduler, pool = self._scheduler, self._scheduler.pool
        # A request that was accepted before there were jobs may need more than they leave.
        most = min(self.most, pool.size - scheduler.most_pages)
        if self._is_shut or self._held + total > most or not scheduler.adapters.make_room(total):
            return None
        tables = []
        for need in needs:
            table = pool.open(f"job {name!r}", need)
            pool.extend(table, need)
            tables.append(table)
        self._held += total
        return tuple(tables)

    def close(self, tables: Iterable[PageTable]) -> None:
        """Take a job's pages back."""
        for table in tables:
            self._held -= len(table.pages)
            self._scheduler.pool.close(table)

    def restart(self, tables: Iterable[PageTable]) -> None:
        """Know what jobs hold, after a call that failed."""
        self._is_shut = False
        self._held = sum(len(table.pages) for table in tables)

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Raise an AssertionError if these are not all pages that jobs hold."""
        assert self._held == sum(len(table.pages) for table in tables)

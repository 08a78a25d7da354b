"""Row allocators: memory for images of adapters' rows, of their own or in pages of the KV cache.

An image (`packed_rows.py`) is as long as whole pages, and each of its pages lies in one of the
cache's. Pages that follow one another take one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.packed_rows import NO_PAGES
from pcg.runtime.adapters.row_table import trimmed
from pcg.runtime.memory.free_runs import FreeRuns
from pcg.runtime.memory.pool import PageTable, runs_of

_UNIT = 512
"""Elements of the unit that a memory of their own is given out in."""
_LEAST_UNITS = 64


class RowAllocator(Protocol):
    """Memory for rows, flat and in the adapters' dtype, given out to adapters.

    Attributes:
        is_in_pool: True if it is that of an engine's pool.
        page_size: elements of a page, across whose end no row lies.
    """

    memory: Tensor
    is_in_pool: bool
    page_size: int

    @property
    def used_bytes(self) -> int:
        """Bytes that nothing else can have while these adapters are there."""

    def reserve(
        self, adapter: Adapter, elements: int, drop: Callable[[], bool], *, grows: bool
    ) -> bool:
        """Reserve memory for an adapter's image; returns False if there is none.

        Args:
            drop: frees another adapter's memory; returns False if none can be freed.
            grows: True if the memory may grow and move; nothing reads or writes it meanwhile.
        """

    def write(self, adapter: Adapter, image: Tensor) -> None:
        """Write an adapter's image into its memory, on any thread.

        The host waits for the copy only if the image is not in pinned memory.
        """

    def places(self, adapter: Adapter, elements: Tensor) -> Tensor:
        """Return where elements of an adapter's image lie in the memory, int64."""

    def holds(self, adapter: Adapter) -> bool:
        """Return True if what was written of an adapter is still there."""

    def drop(self, key: int) -> None:
        """Free an adapter's memory, by the adapter's id."""

    def reset(self) -> None:
        """Free the memory of all adapters, and leave it where it is."""

    def trim(self) -> None:
        """Give up memory that adapters which left do not use; nothing reads or writes it meanwhile.

        Rows stay where they are in it.
        """


class OwnRowAllocator:
    """A memory of its own, which grows as adapters come."""

    is_in_pool = False
    page_size = NO_PAGES

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=dtype, device=device)
        self._free = FreeRuns()
        self._runs: dict[int, tuple[int, int]] = {}

    @property
    def used_bytes(self) -> int:
        return self.memory.nbytes

    def reserve(
        self, adapter: Adapter, elements: int, drop: Callable[[], bool], *, grows: bool
    ) -> bool:
        units = max(-(-elements // _UNIT), 1)
        while self._free.longest < units and drop():
            pass
        if self._free.longest < units:
            if not grows:
                return False
            held = len(self.memory) // _UNIT
            more = max(held, units, _LEAST_UNITS)
            self.memory = torch.nn.functional.pad(self.memory, (0, more * _UNIT))
            self._free.add(held, more)
        start = self._free.fitting(units)
        self._free.take(start, units)
        self._runs[adapter.version] = start, units
        return True

    def write(self, adapter: Adapter, image: Tensor) -> None:
        first = self._runs[adapter.version][0] * _UNIT
        self.memory[first : first + len(image)].copy_(image, non_blocking=True)

    def places(self, adapter: Adapter, elements: Tensor) -> Tensor:
        return elements + self._runs[adapter.version][0] * _UNIT

    def holds(self, adapter: Adapter) -> bool:
        return adapter.version in self._runs

    def drop(self, key: int) -> None:
        run = self._runs.pop(key, None)
        if run is not None:
            self._free.add(*run)

    def reset(self) -> None:
        self._runs, self._free = {}, FreeRuns()
        if units := len(self.memory) // _UNIT:
            self._free.add(0, units)

    def trim(self) -> None:
        held = len(self.memory) // _UNIT
        kept = trimmed(self._free, held, _LEAST_UNITS)
        if kept < held:
            self.memory = self.memory[: kept * _UNIT].clone()


class PagedRowAllocator:
    """Pages of the KV cache's memory, u8, of which each adapter was given some.

    Another `table` of an adapter means that it was evicted in between.
    """

    is_in_pool = True

    def __init__(
        self, pages: Tensor, table: Callable[[Adapter], PageTable], dtype: torch.dtype
    ) -> None:
        self._pages = pages.view(dtype)
        self.memory = self._pages.view(-1)
        self.page_size = self._pages.shape[1]
        self._table = table
        self._tables: dict[int, PageTable] = {}

    @property
    def used_bytes(self) -> int:
        pages = sum(len(table.pages) for table in self._tables.values())
        return pages * self.page_size * self._pages.itemsize

    def reserve(
        self, adapter: Adapter, elements: int, drop: Callable[[], bool], *, grows: bool
    ) -> bool:
        self._tables[adapter.version] = self._table(adapter)
        return True

    def write(self, adapter: Adapter, image: Tensor) -> None:
        own, first = image.view(-1, self.page_size), 0
        for page, count in runs_of(self._tables[adapter.version].pages[: len(own)]):
            self._pages[page : page + count].copy_(own[first : first + count], non_blocking=True)
            first += count

    def places(self, adapter: Adapter, elements: Tensor) -> Tensor:
        pages = torch.tensor(self._tables[adapter.version].pages or [0], dtype=torch.int64)
        return pages[elements // self.page_size] * self.page_size + elements % self.page_size

    def holds(self, adapter: Adapter) -> bool:
        return self._tables.get(adapter.version) is self._table(adapter)

    def drop(self, key: int) -> None:
        self._tables.pop(key, None)

    def reset(self) -> None:
        self._tables.clear()

    def trim(self) -> None:
        """Do nothing: the pages are the cache's."""

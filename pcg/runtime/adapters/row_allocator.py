"""Row allocators: memory for rows of adapters' matrices, of their own or in pages of the KV cache.

In pages rows follow one another, and one that does not fit into the rest of a page begins the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.row_table import trimmed
from pcg.runtime.memory.free_runs import FreeRuns
from pcg.runtime.memory.pool import PageTable

_UNIT = 512
"""Elements of the unit that a memory of their own is given out in."""
_LEAST_UNITS = 64
Shapes: TypeAlias = Sequence[Sequence[int]]
"""Rows of each matrix, and their elements."""


class RowAllocator(Protocol):
    """Memory for rows, flat and in the adapters' dtype, given out to adapters.

    Attributes:
        is_in_pool: True if it is that of an engine's pool.
    """

    memory: Tensor
    is_in_pool: bool

    @property
    def used_bytes(self) -> int:
        """Bytes that nothing else can have while these adapters are there."""

    def reserve(
        self, adapter: Adapter, shapes: Shapes, drop: Callable[[], bool], *, grows: bool
    ) -> list[Tensor] | None:
        """Reserve memory for an adapter; return the first element of each row, int64, or None.

        Args:
            drop: frees another adapter's memory; returns False if none can be freed.
            grows: True if the memory may grow and move; nothing reads or writes it meanwhile.
        """

    def write(self, adapter: Adapter, matrices: Sequence[Tensor]) -> None:
        """Write an adapter's matrices into its memory, on any thread."""

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

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=dtype, device=device)
        self._free = FreeRuns()
        self._runs: dict[int, tuple[int, int]] = {}

    @property
    def used_bytes(self) -> int:
        return self.memory.nbytes

    def reserve(
        self, adapter: Adapter, shapes: Shapes, drop: Callable[[], bool], *, grows: bool
    ) -> list[Tensor] | None:
        units = max(-(-sum(rows * size for rows, size in shapes) // _UNIT), 1)
        while self._free.longest < units and drop():
            pass
        if self._free.longest < units:
            if not grows:
                return None
            held = len(self.memory) // _UNIT
            more = max(held, units, _LEAST_UNITS)
            self.memory = torch.nn.functional.pad(self.memory, (0, more * _UNIT))
            self._free.add(held, more)
        start = self._free.fitting(units)
        self._free.take(start, units)
        self._runs[adapter.version] = start, units
        first = start * _UNIT
        found = []
        for rows, size in shapes:
            found.append(first + size * torch.arange(rows))
            first += rows * size
        return found

    def write(self, adapter: Adapter, matrices: Sequence[Tensor]) -> None:
        flat = _joined(matrices, self.memory.dtype)
        first = self._runs[adapter.version][0] * _UNIT
        self.memory[first : first + len(flat)].copy_(flat)

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
        self._table = table
        self._tables: dict[int, PageTable] = {}

    @property
    def used_bytes(self) -> int:
        pages = sum(len(table.pages) for table in self._tables.values())
        return pages * self._pages.shape[1] * self._pages.itemsize

    def reserve(
        self, adapter: Adapter, shapes: Shapes, drop: Callable[[], bool], *, grows: bool
    ) -> list[Tensor] | None:
        table, page_size = self._table(adapter), self._pages.shape[1]
        found = [torch.empty(rows, dtype=torch.int64) for rows, _ in shapes]
        for i, row, count, page, offset in _packed(shapes, page_size):
            starts = offset + shapes[i][1] * torch.arange(count)
            found[i][row : row + count] = table.pages[page] * page_size + starts
        self._tables[adapter.version] = table
        return found

    def write(self, adapter: Adapter, matrices: Sequence[Tensor]) -> None:
        pages = self._tables[adapter.version].pages
        image = torch.empty((len(pages), self._pages.shape[1]), dtype=self._pages.dtype)
        shapes = [matrix.shape for matrix in matrices]
        for i, row, count, page, offset in _packed(shapes, image.shape[1]):
            end = offset + count * shapes[i][1]
            image[page, offset:end] = matrices[i][row : row + count].flatten()
        device = self._pages.device
        self._pages[torch.tensor(pages, dtype=torch.int64, device=device)] = image.to(device)

    def holds(self, adapter: Adapter) -> bool:
        return self._tables.get(adapter.version) is self._table(adapter)

    def drop(self, key: int) -> None:
        self._tables.pop(key, None)

    def reset(self) -> None:
        self._tables.clear()

    def trim(self) -> None:
        """Do nothing: the pages are the cache's."""


def pages_of_rows(shapes: Shapes, page_elements: int) -> int:
    """Count the pages that rows take; UnsupportedError if one is longer than a page."""
    return max((page + 1 for _, _, _, page, _ in _packed(shapes, page_elements)), default=0)


def _packed(shapes: Shapes, page_elements: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield runs of rows: matrix, first row, rows, index of the page, and element in the page."""
    page, offset = 0, 0
    for i, (rows, size) in enumerate(shapes):
        if size > page_elements and rows:
            raise UnsupportedError(
                f"an adapter's row of {size} elements is longer than a page of the KV cache, "
                f"{page_elements}; compile with backend='torch'"
            )
        row = 0
        while row < rows:
            count = min(rows - row, (page_elements - offset) // size)
            if not count:
                page, offset = page + 1, 0
                continue
            yield i, row, count, page, offset
            row, offset = row + count, offset + count * size


def _joined(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not matrices:
        return torch.empty(0, dtype=dtype)
    return torch.cat([matrix.to(dtype).flatten() for matrix in matrices])

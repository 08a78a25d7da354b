"""Where rows of adapters' matrices lie: in a memory of their own, or in pages of the KV cache.

In pages rows follow one another, and one that does not fit into the rest of a page begins the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.peft.adapter import Adapter
from pcg.runtime.memory.free_runs import FreeRuns
from pcg.runtime.memory.pool import PageTable

_UNIT = 512
"""Elements that a memory of their own is given out in."""
_LEAST_UNITS = 64
Shapes: TypeAlias = Sequence[Sequence[int]]
"""Rows of each matrix, and their elements."""


class RowAllocator(Protocol):
    """A memory, and who has which part of it."""

    @property
    def memory(self) -> Tensor:
        """Flat, of the adapters' dtype."""

    def reserve(
        self, adapter: Adapter, shapes: Shapes, drop: Callable[[], bool], *, grows: bool
    ) -> list[Tensor] | None:
        """Give an adapter room.

        Args:
            adapter: whose it is.
            shapes: of its matrices, [rows, size] each.
            drop: has another adapter give up its room; False where none can.
            grows: whether the memory may move to be larger; nobody reads or writes it then.
        Returns:
            The first element of each row of each matrix, int64; None where there is no room.
        """

    def write(self, adapter: Adapter, matrices: Sequence[Tensor]) -> None:
        """Write an adapter's matrices into its room, on any thread."""

    def holds(self, adapter: Adapter) -> bool:
        """Whether what was written of an adapter is still there."""

    def drop(self, key: int) -> None:
        """Free the room of an adapter, by its identity."""


class OwnRoom:
    """A memory that grows as adapters come."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._free = FreeRuns()
        self._runs: dict[int, tuple[int, int]] = {}

    @property
    def memory(self) -> Tensor:
        return self._memory

    def reserve(
        self, adapter: Adapter, shapes: Shapes, drop: Callable[[], bool], *, grows: bool
    ) -> list[Tensor] | None:
        units = max(-(-sum(rows * size for rows, size in shapes) // _UNIT), 1)
        while self._free.longest < units and drop():
            pass
        if self._free.longest < units:
            if not grows:
                return None
            held = len(self._memory) // _UNIT
            more = max(held, units, _LEAST_UNITS)
            self._memory = torch.nn.functional.pad(self._memory, (0, more * _UNIT))
            self._free.add(held, more)
        start = self._free.fitting(units)
        self._free.take(start, units)
        self._runs[id(adapter)] = start, units
        first = start * _UNIT
        found = []
        for rows, size in shapes:
            found.append(first + size * torch.arange(rows))
            first += rows * size
        return found

    def write(self, adapter: Adapter, matrices: Sequence[Tensor]) -> None:
        flat = _joined(matrices, self._memory.dtype)
        first = self._runs[id(adapter)][0] * _UNIT
        self._memory[first : first + len(flat)].copy_(flat)

    def holds(self, adapter: Adapter) -> bool:
        return id(adapter) in self._runs

    def drop(self, key: int) -> None:
        run = self._runs.pop(key, None)
        if run is not None:
            self._free.add(*run)


class PageRoom:
    """Pages of the KV cache's memory, those that each adapter was given.

    Args:
        pages: the memory, [pages, bytes of one], u8.
        table: the pages of an adapter; another table is of another time that it came.
        dtype: of the adapters.
    """

    def __init__(
        self, pages: Tensor, table: Callable[[Adapter], PageTable], dtype: torch.dtype
    ) -> None:
        self._pages = pages.view(dtype)
        self._memory = self._pages.view(-1)
        self._table = table
        self._tables: dict[int, PageTable] = {}

    @property
    def memory(self) -> Tensor:
        return self._memory

    def reserve(
        self, adapter: Adapter, shapes: Shapes, drop: Callable[[], bool], *, grows: bool
    ) -> list[Tensor] | None:
        table, page_size = self._table(adapter), self._pages.shape[1]
        found = [torch.empty(rows, dtype=torch.int64) for rows, _ in shapes]
        for i, row, count, page, offset in _packed(shapes, page_size):
            starts = offset + shapes[i][1] * torch.arange(count)
            found[i][row : row + count] = table.pages[page] * page_size + starts
        self._tables[id(adapter)] = table
        return found

    def write(self, adapter: Adapter, matrices: Sequence[Tensor]) -> None:
        pages = self._tables[id(adapter)].pages
        image = torch.empty((len(pages), self._pages.shape[1]), dtype=self._pages.dtype)
        shapes = [matrix.shape for matrix in matrices]
        for i, row, count, page, offset in _packed(shapes, image.shape[1]):
            end = offset + count * shapes[i][1]
            image[page, offset:end] = matrices[i][row : row + count].flatten()
        device = self._pages.device
        self._pages[torch.tensor(pages, dtype=torch.int64, device=device)] = image.to(device)

    def holds(self, adapter: Adapter) -> bool:
        return self._tables.get(id(adapter)) is self._table(adapter)

    def drop(self, key: int) -> None:
        self._tables.pop(key, None)


def pages_of_rows(shapes: Shapes, page_elements: int) -> int:
    """Pages that the rows of some matrices take.

    Args:
        shapes: of the matrices.
        page_elements: of a page.
    Raises:
        UnsupportedError: a row is longer than a page.
    """
    return max((page + 1 for _, _, _, page, _ in _packed(shapes, page_elements)), default=0)


def _packed(shapes: Shapes, page_elements: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of rows: matrix, first row, rows, page of the adapter's, and element of the page."""
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

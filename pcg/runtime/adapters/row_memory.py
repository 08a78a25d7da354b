"""Row memory: rows of the running adapters' LoRA matrices, each adapter at its true rank.

An adapter's rows are copied as an image (`packed_rows.py`) into separate memory, or into pages of
the KV cache; contiguous pages take a single copy. Segmented kernels find the rows by tables of
first elements: for each site, A of each output, then B of each output, and the bias. The matrices
of a bottleneck adapter are stored in the same way, with the bias between them as a matrix of a
single row.

Before its first run, an adapter allocates entries of the tables and memory for its rows; both are
released when other adapters need them while the adapter does not run. Tables and memory shrink as
adapters leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pcg.kernels.batch import AdapterSlot, LoraRows, TokenSpans
from pcg.kernels.sizes import RANK_STEP
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.packed_rows import NO_PAGES, RowPacker, RowTable, trimmed, width_of
from pcg.runtime.adapters.padded_tables import AdapterCopies
from pcg.runtime.adapters.sites import JoinedSite
from pcg.runtime.memory.free_runs import FreeRuns
from pcg.runtime.memory.pool import PageTable, runs_of

_UNIT = 512
"""Elements per allocation unit of separate memory."""
_LEAST_OWN_UNITS = 64


class RowAllocator(Protocol):
    """Flat memory for rows, in the adapters' dtype.

    Attributes:
        is_in_pool: True if the memory is part of an engine's pool.
        page_size: elements per page; no row crosses the end of a page.
    """

    memory: Tensor
    is_in_pool: bool
    page_size: int

    @property
    def used_bytes(self) -> int:
        """Bytes reserved for the current adapters."""

    def reserve(
        self, adapter: Adapter, elements: int, drop: Callable[[], bool], *, grows: bool
    ) -> bool:
        """Reserve memory for an adapter's image; return False without room.

        Args:
            drop: frees another adapter's memory; returns False if none can be freed.
            grows: True if the memory may grow and move, as nothing reads or writes it.
        """

    def write(self, adapter: Adapter, image: Tensor) -> None:
        """Write an adapter's image into its memory, on any thread.

        The host waits for the copy only if the image is not in pinned memory.
        """

    def places(self, adapter: Adapter, elements: Tensor) -> Tensor:
        """Return the addresses of an image's elements in the memory, int64."""

    def holds(self, adapter: Adapter) -> bool:
        """Return True if an adapter's image is still in memory."""

    def drop(self, key: int) -> None:
        """Free an adapter's memory by the adapter's id."""

    def reset(self) -> None:
        """Free the memory of all adapters, without moving it."""

    def trim(self) -> None:
        """Release unused memory, without moving rows; nothing may read or write the memory."""


class OwnRowAllocator:
    """Separate memory, which grows with the adapters."""

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
            more = max(held, units, _LEAST_OWN_UNITS)
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
        kept = trimmed(self._free, held, _LEAST_OWN_UNITS)
        if kept < held:
            self.memory = self.memory[: kept * _UNIT].clone()


class PagedRowAllocator:
    """Pages of the KV cache's memory, u8, which the engine assigns to adapters.

    If an adapter's `table` has changed, the adapter was evicted in between.
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
        source, first = image.view(-1, self.page_size), 0
        for page, count in runs_of(self._tables[adapter.version].pages[: len(source)]):
            self._pages[page : page + count].copy_(source[first : first + count], non_blocking=True)
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
        """Do nothing, as the pages belong to the cache."""


_NO_TOKENS = TokenSpans(())


class RowMemory:
    """The rows of running adapters, and tables of their addresses."""

    def __init__(
        self,
        sites: Sequence[JoinedSite],
        packer: RowPacker,
        allocator: RowAllocator,
        device: torch.device,
    ) -> None:
        self.sites = tuple(sites)
        self._packer = packer
        self._allocator = allocator
        counts = [len(site.matrices) for site in self.sites]
        *self._first, matrices = accumulate(counts, initial=0)
        self._copies = AdapterCopies(device)
        self._slots: dict[int, AdapterSlot] = {}
        self._copying: dict[int, AdapterSlot] = {}
        self._running: set[int] = set()
        self._table = RowTable(matrices, device)
        self._views: list[LoraRows] = []
        self._views_of: object = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the adapters' rows and of the tables of addresses."""
        return self._allocator.used_bytes + self._table.rows.nbytes + self._table.ranks.nbytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the rows in pages of a cache."""
        return self._allocator.used_bytes if self._allocator.is_in_pool else 0

    @property
    def element_bytes(self) -> int:
        return self._allocator.memory.itemsize

    @property
    def entries(self) -> int:
        return len(self._table.rows)

    def slot(self, adapter: Adapter) -> AdapterSlot:
        return self._slots[adapter.version]

    def prefetch(self, wanted: Sequence[Adapter]) -> bool:
        """Start copying adapters that run next, in order, into memory of adapters that do not run.

        Returns:
            True if an adapter got or lost memory.
        """
        moved = self._finish_copies()
        kept = self._running | {each.version for each in wanted}
        for adapter in wanted:
            key = adapter.version
            if key in self._copying or self._has(adapter):
                continue
            self._drop(key)
            slot = self._reserve(adapter, kept, grows=False)
            if slot is None:
                break
            moved = True
            self._copying[key] = slot
            self._copies.begin(key, partial(self._write, adapter, slot))
        return moved

    def is_copying(self, adapter: Adapter) -> bool:
        return self._copies.is_under_way(adapter.version)

    def close(self) -> None:
        """Wait for copies, and write nothing afterwards."""
        self._copies.wait()

    def reset(self) -> None:
        """Drop all adapters, without moving the memory."""
        self._copies.reset()
        self._slots, self._copying, self._running = {}, {}, set()
        self._table.reset()
        self._allocator.reset()

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Copy the running adapters into memory; return True if an adapter was copied.

        Other adapters stay until their memory is needed.
        """
        self._running = {each.version for each in wanted}
        came = self._finish_copies()
        new = []
        for adapter in wanted:
            if self._has(adapter):
                # Slots are in the order of last use.
                self._slots[adapter.version] = self._slots.pop(adapter.version)
            else:
                self._drop(adapter.version)
                new.append(adapter)
        for adapter in new:
            self._bring(adapter)
        return came or bool(new)

    def reserve(self, slots: int, adapters: Sequence[Adapter]) -> None:
        """Reserve tables for `slots` adapters of such ranks, so that the tables do not move."""
        self._finish_copies(wait=True)
        self._table.reserve(slots, map(self._packer.rank, adapters))

    def widest(self, adapters: Sequence[Adapter]) -> int:
        """Return the width of the widest adapter in the tables, at least RANK_STEP."""
        return max(map(width_of, map(self._packer.rank, adapters)), default=RANK_STEP)

    def forget(self, adapter: Adapter) -> None:
        """Free the memory of an adapter that has changed or is gone."""
        self._drop(adapter.version)
        if not self._copying:  # memory may move only without pending copies
            self._table.trim()
            self._allocator.trim()

    @property
    def layout(self) -> object:
        """The addresses and shapes of memory and tables."""
        tensors = (self._allocator.memory, self._table.rows, self._table.ranks)
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)

    def bound(self, tokens: TokenSpans) -> list[tuple[JoinedSite, LoraRows]]:
        """Return the rows for emitted functions at each site."""
        layout = self.layout
        if layout != self._views_of:
            # Data that kernels derived from the previous tensors is stale.
            views = map(self._view_at, self.sites, self._first)
            self._views_of, self._views = layout, [*views]
        pairs = zip(self.sites, self._views, strict=True)
        return [(site, replace(view, tokens=tokens)) for site, view in pairs]

    def _view_at(self, site: JoinedSite, first: int) -> LoraRows:
        modules = site.modules
        bias = slice(first + 2 * len(modules), first + len(site.matrices))
        return LoraRows(
            self._allocator.memory,
            self._table.rows,
            first,
            self._table.ranks[first : first + len(modules)],
            site.in_size,
            tuple(module.column for module in modules),
            tuple(module.size for module in modules),
            self._table.ranks[bias],
            _NO_TOKENS,
            {},
        )

    def _has(self, adapter: Adapter) -> bool:
        return adapter.version in self._slots and self._allocator.holds(adapter)

    def _bring(self, adapter: Adapter) -> None:
        # Memory and tables may move, so no copy may be running.
        self._finish_copies(wait=True)
        slot = self._reserve(adapter, self._running, grows=True)
        assert slot is not None
        self._write(adapter, slot)
        self._slots[adapter.version] = slot

    def _reserve(self, adapter: Adapter, kept: set[int], *, grows: bool) -> AdapterSlot | None:
        """Reserve memory for an adapter, evicting adapters not in `kept`; None without room."""
        layout = self._packer.layout(adapter)

        def drop() -> bool:
            """Evict the least recently used adapter that is not in `kept`."""
            key = next((key for key in self._slots if key not in kept), None)
            if key is not None:
                self._drop(key)
            return key is not None

        slot = self._table.take(layout.rank, drop, grows=grows)
        if slot is None:
            return None
        if not self._allocator.reserve(adapter, layout.elements, drop, grows=grows):
            self._table.give_back(slot)
            return None
        return slot

    def _write(self, adapter: Adapter, slot: AdapterSlot) -> bool:
        self._allocator.write(adapter, self._packer.image(adapter))
        layout = self._packer.layout(adapter)
        self._table.write(slot, self._allocator.places(adapter, layout.starts), layout.ranks)
        return True

    def _finish_copies(self, *, wait: bool = False) -> bool:
        came = False
        for key, slot in list(self._copying.items()):
            if wait or key in self._running or not self._copies.is_under_way(key):
                del self._copying[key]
                if self._copies.take(key):
                    self._slots[key] = slot
                else:
                    self._allocator.drop(key)
                    self._table.give_back(slot)
                came = True
        return came

    def _drop(self, key: int) -> None:
        slot = self._copying.pop(key, None)
        if slot is None:
            slot = self._slots.pop(key, None)
        else:
            self._copies.take(key)
        if slot is not None:
            self._allocator.drop(key)
            self._table.give_back(slot)

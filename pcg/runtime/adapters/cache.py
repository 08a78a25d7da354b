"""The adapter cache: adapters on the device, paged in for requests and evicted for others.

All adapters are in host memory. A serving adapter has pages of the pool, like the KV cache (S-LoRA
§5). The adapter keeps its pages after its last request until their memory is needed; the least
recently used adapter is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from pcg.errors import PcgError
from pcg.runtime.memory.pool import PagePool, PageTable


class ServedAdapter(Protocol):
    """The part of `pcg.peft.adapter.Adapter` that scheduling needs."""

    @property
    def name(self) -> str:
        """The name that requests use."""

    @property
    def version(self) -> int:
        """A number that is unique among all adapters and versions in the process."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the adapter's tensors."""

    @property
    def prompt_tokens(self) -> int:
        """Number of virtual tokens before each sequence."""


@dataclass(eq=False)
class _Resident:
    adapter: ServedAdapter
    table: PageTable
    users: int = 0
    is_stale: bool = False


class AdapterCache:
    """The adapters with pages; `idle_pages` counts pages of adapters without running requests."""

    def __init__(self, pool: PagePool, pages_of: Callable[[ServedAdapter], int]) -> None:
        self.on_page_in: Callable[[ServedAdapter], None] = lambda adapter: None
        self.on_evict: Callable[[ServedAdapter], None] = lambda adapter: None
        self._pool = pool
        self._pages_of = pages_of
        self._known: WeakKeyDictionary[ServedAdapter, int] = WeakKeyDictionary()
        self._residents: dict[int, _Resident] = {}
        self._idle: OrderedDict[int, _Resident] = OrderedDict()
        self._gone: WeakSet[ServedAdapter] = WeakSet()
        self.idle_pages = 0

    def __len__(self) -> int:
        return len(self._residents)

    def pages_of(self, adapter: ServedAdapter | None) -> int:
        """Return the number of pages of an adapter; 0 for None."""
        if adapter is None:
            return 0
        pages = self._known.get(adapter)
        if pages is None:
            pages = self._known[adapter] = self._pages_of(adapter)
        return pages

    def table(self, adapter: ServedAdapter) -> PageTable:
        """Return the pages of an adapter on the device."""
        return self._residents[adapter.version].table

    def use_of(self, adapter: ServedAdapter) -> tuple[int, int]:
        """Return an adapter's current number of pages, and of running requests."""
        resident = self._residents.get(adapter.version)
        return (0, 0) if resident is None else (len(resident.table.pages), resident.users)

    def has(self, adapter: ServedAdapter | None) -> bool:
        """Return True for an adapter on the device, and for None."""
        return adapter is None or adapter.version in self._residents

    def bring(self, adapter: ServedAdapter) -> bool:
        """Page an adapter in, evicting unused adapters; return False if it does not fit."""
        if self.has(adapter):
            if adapter.version in self._idle:
                self._idle.move_to_end(adapter.version)
            return True
        need = self.pages_of(adapter)
        if not self.make_room(need):
            return False
        table = self._pool.open(f"adapter {adapter.name!r}")
        self._pool.extend(table, need, last=True)
        self._residents[adapter.version] = self._idle[adapter.version] = _Resident(adapter, table)
        self.idle_pages += need
        self.on_page_in(adapter)
        return True

    def make_room(self, pages: int) -> bool:
        """Evict unused adapters until `pages` pages are free; return False if impossible."""
        if pages > self._pool.free + self.idle_pages:
            return False
        while self._pool.free < pages:
            self._evict(next(iter(self._idle)))
        return True

    def use(self, adapter: ServedAdapter | None) -> None:
        """Add a running request of an adapter."""
        if adapter is not None:
            resident = self._residents[adapter.version]
            resident.users += 1
            if self._idle.pop(adapter.version, None) is not None:
                self.idle_pages -= len(resident.table.pages)

    def release(self, adapter: ServedAdapter | None) -> None:
        """Remove a running request of an adapter."""
        if adapter is not None:
            resident = self._residents[adapter.version]
            resident.users -= 1
            if not resident.users:
                self._idle[adapter.version] = resident
                self.idle_pages += len(resident.table.pages)
                if resident.is_stale or adapter in self._gone:
                    self._evict(adapter.version)

    def forget(self, adapter: ServedAdapter, *, is_gone: bool) -> None:
        """Free the pages of a changed adapter once no running request uses them.

        Args:
            is_gone: True if no later request can name the adapter: its pages are freed after the
                last running request.
        """
        if is_gone:
            self._gone.add(adapter)
        resident = self._residents.get(adapter.version)
        if resident is not None:
            resident.is_stale = True
            if not resident.users:
                self._evict(adapter.version)

    def is_gone(self, adapter: ServedAdapter) -> bool:
        """Return True for an adapter that no later request can name."""
        return adapter in self._gone

    def leave(self, adapter: ServedAdapter | None) -> None:
        """Handle a waiting request that left, for which an adapter may have been kept."""
        if adapter is not None and adapter.version in self._idle and adapter in self._gone:
            self._evict(adapter.version)

    def reset(self) -> None:
        """Drop all adapters, in a pool without held pages."""
        self._residents.clear()
        self._idle.clear()
        self.idle_pages = 0

    def check_integrity(self) -> None:
        """Raise an AssertionError if an adapter has wrong pages, or is both idle and used."""
        idle = {key: of_key for key, of_key in self._residents.items() if not of_key.users}
        assert idle == dict(self._idle)
        assert not any(of_key.is_stale for of_key in idle.values())
        assert self.idle_pages == sum(len(of_key.table.pages) for of_key in idle.values())
        for resident in self._residents.values():
            assert len(resident.table.pages) == self.pages_of(resident.adapter)
            assert resident.users >= 0

    def _evict(self, key: int) -> None:
        resident = self._residents.pop(key)
        if resident.users:
            raise PcgError(f"adapter {resident.adapter.name!r} is in use and cannot be evicted")
        del self._idle[key]
        self.idle_pages -= len(resident.table.pages)
        self._pool.close(resident.table)
        self.on_evict(resident.adapter)

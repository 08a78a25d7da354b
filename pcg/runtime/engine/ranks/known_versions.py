"""The versions of adapters that messages name, and the adapters that they are."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque

from pcg.errors import AdapterError, ParallelError
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.model.state import ModelState


class _NamedVersions(ABC):
    """Is told of every version that is served from now on, and of those that are alive now."""

    def __init__(self, state: ModelState) -> None:
        self._versions = state.versions
        for adapter in state.versions.alive():
            self._begin(adapter)
        self._end = state.versions.listen(self._listen)

    def _listen(self, _: str, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._begin(adapter)

    @abstractmethod
    def _begin(self, adapter: Adapter) -> None:
        """Take note of a version that is served, or alive."""

    def _named(self, adapter: Adapter) -> VersionName | None:
        version = self._versions.of(adapter)
        return None if version is None else version.key

    def close(self) -> None:
        """Hear of no version any more."""
        self._end()


class ToldVersions(_NamedVersions):
    """The versions that the other ranks keep for the first one.

    Attributes:
        released: those that nothing here refers to any more, which the others need not keep.
    """

    def __init__(self, state: ModelState) -> None:
        self.released: deque[VersionName] = deque()
        self._told: set[VersionName] = set()
        super().__init__(state)

    def _begin(self, adapter: Adapter) -> None:
        name = self._named(adapter)
        if name is not None:
            self._told.add(name)
            weakref.finalize(adapter, self.released.append, name).atexit = False

    def take_released(self) -> list[VersionName]:
        """Return the versions that were released since the last call."""
        found = []
        while self.released:
            found.append(self.released.popleft())
        self._told.difference_update(found)
        return found

    def name_of(self, adapter: Adapter) -> VersionName:
        """Return what names an adapter. AdapterError: it was never served here."""
        name = self._named(adapter)
        if name is None or name not in self._told:
            raise AdapterError(
                f"adapter {adapter.name!r} was never served by this engine; use one of the "
                "executor's `adapters`, or its name"
            )
        return name


class KeptVersions(_NamedVersions):
    """The adapters of all versions that the first rank may still name, on another rank."""

    def __init__(self, state: ModelState) -> None:
        self._adapters: dict[VersionName, Adapter] = {}
        super().__init__(state)

    def _begin(self, adapter: Adapter) -> None:
        name = self._named(adapter)
        if name is not None:
            self._adapters[name] = adapter

    def close(self) -> None:
        super().close()
        self._adapters.clear()

    def release(self, name: VersionName) -> None:
        """Keep a version no longer."""
        self._adapters.pop(name, None)

    def adapter(self, name: VersionName) -> Adapter:
        """Return the adapter of a version. ParallelError: there is none."""
        try:
            return self._adapters[name]
        except KeyError:
            raise ParallelError(
                f"adapter {name.name}@{name.number} of rank 0 is not on this rank; have all ranks "
                "add and remove the same adapters before the engine is started"
            ) from None

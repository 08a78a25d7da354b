"""The adapters of an engine in another process, as the server names them.

An adapter that is replaced or removed stays there as long as anything here refers to it, so that
requests that are on their way meanwhile are answered by the version that they name.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pcg.runtime.adapters.versions import AdapterVersion
from pcg.serve.engine.messages import AdapterData, ChunkData, VersionName


@dataclass(eq=False)
class RemoteAdapter:
    """An adapter in the engine's process.

    Attributes:
        served: its version.
        version: a number that no other adapter has in this process.
    """

    served: AdapterVersion
    size_bytes: int
    prompt_tokens: int
    version: int

    @property
    def name(self) -> str:
        return self.served.name

    def answering(self, data: ChunkData) -> AdapterVersion | None:
        """Return the version that a chunk says, which may be a later one of a trained adapter."""
        if data.version is None:
            return None
        if data.version != self.served.number:
            return AdapterVersion(self.name, data.version, digest=data.digest)
        if data.digest is not None:
            self.served.learn(data.digest)
        return self.served


class RemoteAdapters:
    """The adapters that requests may name, by name.

    Attributes:
        released: versions that nothing here refers to any more, of which the engine is to be told.
    """

    def __init__(self) -> None:
        self.released: deque[VersionName] = deque()
        self._here: dict[str, RemoteAdapter] = {}
        self._known: weakref.WeakValueDictionary[VersionName, RemoteAdapter]
        self._known = weakref.WeakValueDictionary()
        self._versions = itertools.count(1)

    @property
    def here(self) -> Mapping[str, RemoteAdapter]:
        """All of them now."""
        return self._here.copy()

    def put(self, data: AdapterData) -> None:
        """Have an adapter answer to its name."""
        self._here[data.version.name] = self.known(data)

    def known(self, data: AdapterData) -> RemoteAdapter:
        """Return the adapter of a version."""
        named = data.version
        adapter = self._known.get(named)
        if adapter is None:
            version = AdapterVersion(named.name, named.number, digest=data.digest)
            adapter = RemoteAdapter(
                version, data.size_bytes, data.prompt_tokens, next(self._versions)
            )
            self._known[named] = adapter
            weakref.finalize(adapter, self.released.append, named).atexit = False
        return adapter

    def remove(self, name: str) -> None:
        """Have nothing answer to a name."""
        self._here.pop(name, None)

"""Versions of served adapters: name@number, each with a digest of its weights.

The versions of a name are numbered from 1, and no number is used twice, even after the adapter is
removed. Replacing an adapter, publishing a trained adapter, and changing an adapter in place each
create a version.

    digest = sha256(configuration, saved tensors)    `pcg.peft.adapter_files.digest_of`

Hashing takes a millisecond per MiB or two, so it runs on a separate thread: when an engine on a
thread first serves the version, or when a version that answered requests is replaced; otherwise
when the digest is first read. A version keeps no weights alive: if weights are freed or changed
before hashing, the digest stays unknown.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from pcg.errors import AdapterConflictError, AdapterError, AdapterNotFoundError
from pcg.kernels.devices import device_pool
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import digest_of
from pcg.units import shown

_GONE_NAMES = 65_536
"""Number of removed names with a remembered last number; older names continue at the maximum."""
_MOST_WAITING = 8
"""Maximum number of replaced versions that wait for hashing; further digests stay unknown."""


class VersionName(NamedTuple):
    """The name of a version in messages."""

    name: str
    number: int


class AdapterVersion:
    """A version of a current or former served adapter; its text is `name@number`.

    Attributes:
        name: the adapter's name.
        number: the number of the version, from 1.
    """

    def __init__(
        self, name: str, number: int, adapter: Adapter | None = None, digest: str | None = None
    ) -> None:
        """Create a version, with an adapter, or the digest of an adapter in another process."""
        self.name = name
        self.number = number
        self._adapter: Callable[[], Adapter | None] = _nothing
        if adapter is not None:
            self._adapter = weakref.ref(adapter)
        self._lock = Lock()
        self._digest = digest

    @property
    def digest(self) -> str | None:
        """The digest, "sha256:" and 64 hexadecimal digits, computed on demand; None if unknown."""
        adapter = self._adapter()
        if self._digest is None and adapter is not None:
            self.compute(adapter)
        return self._digest

    @property
    def known_digest(self) -> str | None:
        """The digest if already computed, else None."""
        return self._digest

    @property
    def key(self) -> VersionName:
        return VersionName(self.name, self.number)

    def compute(self, adapter: Adapter) -> None:
        """Compute the digest of this version's adapter, unless already computed."""
        with self._lock:
            if self._digest is None:
                self._digest = digest_of(adapter)

    def lose(self) -> None:
        """Mark the tensors as changed; a digest not yet computed stays unknown."""
        self._adapter = _nothing

    def learn(self, digest: str | None) -> None:
        """Set a digest computed in another process."""
        self._digest = digest

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"

    def __repr__(self) -> str:
        return f"<adapter version {self}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdapterVersion):
            return NotImplemented
        return (self.name, self.number) == (other.name, other.number)

    def __hash__(self) -> int:
        return hash((self.name, self.number))


def _nothing() -> None:
    return None


@dataclass
class _Served:
    """A version and its use.

    Attributes:
        is_asked: True if the version has answered a request.
        is_past: True if no later request can name the version.
        is_hashed: True if the digest was requested in the background.
    """

    version: AdapterVersion
    is_asked: bool = False
    is_past: bool = False
    is_hashed: bool = False


class Versions:
    """The versions of an executor's adapters; thread-safe.

    Args:
        device: the device of adapters in training.
        collects: collect garbage before listing adapters, because ranks must list the same adapters
            to compile the same program.

    Attributes:
        agreed: over ranks with a leader, replaces the live adapters of this rank by those of rank
            0; None elsewhere.
    """

    def __init__(self, device: torch.device, *, collects: bool) -> None:
        self.agreed: Callable[[list[Adapter]], list[Adapter]] | None = None
        self._collects = collects
        self._lock = Lock()
        self._of: WeakKeyDictionary[Adapter, _Served] = WeakKeyDictionary()
        self._named: WeakValueDictionary[VersionName, Adapter] = WeakValueDictionary()
        self._last: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._least = 0
        self._hashing = device_pool(device, 1, "pcg digests")
        self._waiting = 0
        self._listeners: list[Callable[[str, Adapter | None], None]] = []

    def listen(self, tell: Callable[[str, Adapter | None], None]) -> Callable[[], None]:
        """Call a function on each change of a name, with the new adapter, or None if removed.

        Returns:
            A function that ends the calls.
        """
        self._listeners.append(tell)
        return partial(self._listeners.remove, tell)

    def begin(self, adapter: Adapter) -> AdapterVersion:
        """Create the next version of the adapter's name."""
        name = adapter.name
        with self._lock:
            before = self._of.get(adapter)
            if before is not None:
                before.version.lose()
            last = self._last.get(name)
            if last is None:
                last = self._gone.pop(name, self._least)
            self._last[name] = last + 1
            version = AdapterVersion(name, last + 1, adapter)
            self._of[adapter] = _Served(version)
            self._named[version.key] = adapter
        for tell in self._listeners:
            tell(name, adapter)
        return version

    def of(self, adapter: Adapter) -> AdapterVersion | None:
        """Return an adapter's version; None for an adapter that was never served."""
        with self._lock:
            served = self._of.get(adapter)
        return None if served is None else served.version

    def named(self, name: VersionName) -> Adapter:
        """Return the adapter of a version. AdapterNotFoundError: no such live adapter."""
        with self._lock:
            adapter = self._named.get(name)
        if adapter is None:
            raise AdapterNotFoundError(f"there is no adapter {name.name}@{name.number} any more")
        return adapter

    def hash(self, names: Sequence[VersionName]) -> Future[list[str | None]]:
        """Compute the digests of versions in the background; None for freed weights."""

        def digest(name: VersionName) -> str | None:
            try:
                version = self.of(self.named(name))
            except AdapterNotFoundError:
                return None
            return None if version is None or version.key != name else version.digest

        return self._hashing.submit(lambda: [digest(name) for name in names])

    def answer(self, adapter: Adapter, *, hashes: bool) -> AdapterVersion | None:
        """Return the version that answers a request; `hashes` computes its digest later.

        In any case, the digest is computed before the weights are released.
        """
        with self._lock:
            served = self._of.get(adapter)
            if served is None:
                return None
            served.is_asked = True
            if hashes or served.is_past:
                self._hash(adapter, served)
            return served.version

    def end(self, adapter: Adapter, *, is_removed: bool = False) -> None:
        """Mark a version that no later request can name; `is_removed` if its name is removed."""
        with self._lock:
            served = self._of.get(adapter)
            if served is not None:
                served.is_past = True
                if served.is_asked:
                    self._hash(adapter, served)
            if is_removed:
                self._gone[adapter.name] = self._last.pop(adapter.name, self._least)
            if len(self._gone) > _GONE_NAMES:
                self._least = max(self._least, self._gone.pop(next(iter(self._gone))))
        for tell in self._listeners if is_removed else ():
            tell(adapter.name, None)

    def check_free(
        self, name: str, present: Adapter | None, *, replace: bool, expected_version: int | None
    ) -> None:
        """Raise an AdapterConflictError unless a name's adapter, if any, may be replaced."""
        version = None if present is None else self.of(present)
        number = 0 if version is None else version.number
        if expected_version is None:
            if number and not replace:
                raise AdapterConflictError(
                    f"there is an adapter {name!r} already; remove it first, or give replace=True"
                )
        elif expected_version != number:
            raise AdapterConflictError(
                f"expected_version={expected_version}, and of adapter {name!r} there is "
                f"{version or 'none'}; it was changed meanwhile"
            )

    def checked(self, adapter: Adapter | None) -> Adapter | None:
        """Return an adapter, or None. AdapterError: a wrong type, or a never served adapter."""
        if not isinstance(adapter, Adapter | None):
            raise AdapterError(
                f"adapter={shown(adapter)}; use one of the executor's `adapters`, its name, or None"
            )
        if adapter is not None and self.of(adapter) is None:
            raise AdapterError(
                f"adapter {adapter.name!r} was never served by this executor; use one of its "
                "`adapters`, or a name"
            )
        return adapter

    def alive(self) -> list[Adapter]:
        """Return the served adapters, and the adapters of running requests."""
        if self._collects:
            gc.collect()
        with self._lock:
            adapters = list(self._of)
        return adapters if self.agreed is None else self.agreed(adapters)

    def _hash(self, adapter: Adapter, served: _Served) -> None:
        """Compute a digest in the background, unless too many are pending."""
        if served.is_hashed or served.version.known_digest or self._waiting >= _MOST_WAITING:
            return
        served.is_hashed = True
        self._waiting += 1
        self._hashing.submit(self._run, adapter, served.version)

    def _run(self, adapter: Adapter, version: AdapterVersion) -> None:
        try:
            version.compute(adapter)
        finally:
            with self._lock:
                self._waiting -= 1

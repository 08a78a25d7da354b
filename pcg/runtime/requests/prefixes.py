"""Prefix caching: requests of the same adapter version share the KV blocks of common prefixes.

A block is a page full of tokens. Its keys and values depend on its tokens, on the tokens before
them, and on the weights: sequences have no padding, sliding windows drop nothing from the cache,
and virtual tokens belong to the adapter. So within a version

    digest of block i = sha256(digest of block i - 1, its token ids)

identifies a block. The number of cached tokens reveals earlier requests, so the first digest
includes the request's `cache_salt` and, unless the operator shares between tenants, its tenant: no
tenant finds another tenant's blocks. Each version has its own index, which is dropped when the
adapter is replaced, changed or removed. A block can be found from the step that fills it, because
every layer writes the keys and values of all tokens of a step before attention.

Source: vLLM's automatic prefix caching (blocks by the hashes of their chain). Indexes by version,
and blocks found after the first chunk of a prompt, are our own.
"""

from __future__ import annotations

import json
from array import array
from hashlib import sha256
from weakref import WeakKeyDictionary

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.requests.sequence import Sequence, Version
from pcg.runtime.requests.snapshots import Snapshots


class Prefixes:
    """An index of the shared blocks in a pool."""

    def __init__(
        self, pool: PagePool, *, between_tenants: bool = False, snapshots: range = range(0)
    ) -> None:
        """Create an empty index.

        Args:
            snapshots: slots of recurrent states; empty for a model without any.
        """
        self._pool = pool
        self.snapshots = Snapshots(snapshots) if snapshots else None
        self._between_tenants = between_tenants
        pool.shared.on_reclaim = self._reclaimed
        self._base = Version()
        self._versions: WeakKeyDictionary[object, Version] = WeakKeyDictionary()
        self._blocks: dict[int, tuple[Version, bytes]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, sequence: Sequence) -> None:
        """Append the shared blocks that continue a sequence to its table; advance `cached`.

        The last token, and all tokens with rows to read, remain to be computed. A sequence without
        a table gets a table with the first block.
        """
        if self.snapshots is not None:
            self._find_states(sequence, self.snapshots)
            return
        table, place = sequence.table, 0
        if table is None:
            sequence.blocks.version = self._version(sequence.request.adapter)
        else:
            self._share(sequence, sequence.cached)
            place = table.shared
            if place * PAGE_TOKENS != sequence.cached:
                return  # within a block, or the version is no longer current
        version, most = sequence.blocks.version, sequence.skippable // PAGE_TOKENS
        assert version is not None
        while place < most and version.pages:
            page = version.pages.get(self._digest(sequence, place))
            if page is None:
                return
            if table is None:
                table = sequence.table = self._pool.open(sequence.id)
            self._pool.adopt(table, page)
            place += 1
            sequence.cached = place * PAGE_TOKENS

    def _find_states(self, sequence: Sequence, snapshots: Snapshots) -> None:
        """Start a sequence from the longest of its prefixes that has a snapshot."""
        blocks = sequence.blocks
        if sequence.table is not None:
            return  # its state goes on
        version = blocks.version = self._version(sequence.request.adapter)
        blocks.restored, place, first = -1, 0, 0
        most = sequence.skippable // PAGE_TOKENS
        while place < most and (digest := self._digest(sequence, place)) in version.pages:
            place += 1
            if digest in version.states:
                first, blocks.restored = place, version.states[digest]
        blocks.common = place * PAGE_TOKENS
        if not first:
            return
        table = sequence.table = self._pool.open(sequence.id)
        for digest in blocks.digests[:first]:
            self._pool.adopt(table, version.pages[digest])
        snapshots.use(blocks.restored)
        sequence.cached = first * PAGE_TOKENS

    def keep(self, sequence: Sequence, tokens: int) -> None:
        """Index the blocks that a sequence fills with its next tokens, for other sequences."""
        end, blocks, table = sequence.cached + tokens, sequence.blocks, sequence.table
        if blocks.known < sequence.request.length:
            # The prompt's tokens that were found in the cache since the last call.
            start = max(blocks.known, sequence.request.virtual_tokens)
            blocks.found += max(min(sequence.cached, sequence.request.length) - start, 0)
            blocks.known = max(blocks.known, end)
        end = min(end, sequence.length - sequence.ahead)
        if self.snapshots is not None:
            self.snapshots.plan(sequence, end, lambda block: self._digest(sequence, block))
        if table is not None and (table.shared + 1) * PAGE_TOKENS <= end:
            self._share(sequence, end)

    def forget(self, adapter: object) -> None:
        """Drop the blocks of an adapter that is removed, replaced or changed.

        Blocks of running requests stay until the requests end.
        """
        version = self._versions.pop(adapter, None)
        if version is not None:
            self._drop(version)

    def reset(self) -> None:
        """Drop all blocks, after the pool has stopped sharing pages."""
        for version in (self._base, *self._versions.values()):
            version.is_current = False
        if self.snapshots is not None:
            self.snapshots.reset()
        self._blocks.clear()
        self._versions.clear()
        self._base = Version()

    def check_integrity(self) -> None:
        """Raise an AssertionError if a block is missing in its version, or its page not shared."""
        shared = set(self._pool.shared)
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        for page, (version, digest) in self._blocks.items():
            assert version.is_current
            assert version.pages[digest] == page
            assert page in shared
        for version in (self._base, *self._versions.values()):
            assert version.is_current
            assert set(version.pages.values()) <= self._blocks.keys()

    def _share(self, sequence: Sequence, end: int) -> None:
        """Share a sequence's full blocks up to a token; pages filled before replace its own."""
        table, version = sequence.table, sequence.blocks.version
        assert table is not None
        assert version is not None
        while version.is_current and (table.shared + 1) * PAGE_TOKENS <= end:
            digest = self._digest(sequence, table.shared)
            page = version.pages.get(digest)
            if page is None:
                page = self._pool.share(table)
                version.pages[digest] = page
                self._blocks[page] = version, digest
            elif (table.shared + 1) * PAGE_TOKENS <= sequence.cached:
                self._pool.adopt(table, page)
            else:
                return  # this sequence writes the block in this step

    def _version(self, adapter: object | None) -> Version:
        if adapter is None:
            return self._base
        return self._versions.setdefault(adapter, Version())

    def _digest(self, sequence: Sequence, place: int) -> bytes:
        digests = sequence.blocks.digests
        if place >= len(digests):
            first, last = len(digests), (sequence.length - sequence.ahead) // PAGE_TOKENS
            ids = array("q", sequence.ids(first * PAGE_TOKENS, last * PAGE_TOKENS))
            for start in range(0, len(ids), PAGE_TOKENS):
                if digests:
                    before = digests[-1]
                else:
                    tenant = "" if self._between_tenants else sequence.request.tenant
                    before = json.dumps([tenant, sequence.request.cache_salt]).encode()
                block = ids[start : start + PAGE_TOKENS].tobytes()
                digests.append(sha256(before + block).digest())
        return digests[place]

    def _drop(self, version: Version) -> None:
        version.is_current = False
        if self.snapshots is not None:
            self.snapshots.drop(version)
        for page in version.pages.values():
            del self._blocks[page]
            self._pool.forget(page)
        version.pages.clear()

    def _reclaimed(self, page: int) -> None:
        version, digest = self._blocks.pop(page)
        del version.pages[digest]

"""Prefixes: requests of one version of an adapter share the KV blocks of their common beginning.

A block is a page full of tokens. What its rows hold is a function of its tokens, of those before
them, and of the weights that run: positions count from the first token of each sequence, which has
no padding before it; whatever a token does not attend to any more, as in a sliding window, stays in
the cache; the virtual tokens of a prompt or prefix are those of the adapter. So within a version

    digest of block i = sha256(digest of block i − 1, its token ids)

finds it. Versions have indexes of their own, and one that is replaced, changed or removed is never
asked again. A block can be found from the step on that fills it: every layer writes the keys and
values of all tokens of a step before it attends to any.

Source: vLLM's automatic prefix caching (blocks by the hashes of their chain). Indexes by version,
and blocks found behind the first chunk of a prompt, are our own.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from weakref import WeakKeyDictionary

from pcg.runtime.engine.request import ServedAdapter
from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.memory.pool import PAGE_TOKENS, PagePool


@dataclass(eq=False)
class Version:
    """The blocks of one version of an adapter, or of the base.

    Attributes:
        pages: by the digest of their block.
        is_current: whether blocks may come to it.
    """

    pages: dict[bytes, int] = field(default_factory=dict)
    is_current: bool = True


class Prefixes:
    """The blocks that can be found.

    Args:
        pool: of all pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        pool.shared.on_reclaim = self._reclaimed
        self._base = Version()
        self._versions: WeakKeyDictionary[ServedAdapter, Version] = WeakKeyDictionary()
        self._blocks: dict[int, tuple[Version, bytes]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, sequence: Sequence) -> None:
        """Give a sequence the blocks that come next to what it has, where they are there.

        Its `cached` moves behind them; one token is left to compute, whatever is there. A sequence
        without a table gets one with the first block.
        """
        table, place = sequence.table, 0
        if table is None:
            sequence.version = self._version(sequence.request.adapter)
        else:
            self._share(sequence, sequence.cached)
            place = table.shared
            if place * PAGE_TOKENS != sequence.cached:
                return  # amid a block, or its version is another's past
        version, most = sequence.version, (sequence.length - 1) // PAGE_TOKENS
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

    def keep(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the blocks that a sequence fills with its next tokens."""
        end = sequence.cached + tokens
        if sequence.known < sequence.request.length:
            sequence.found += self._found(sequence)
            sequence.known = max(sequence.known, end)
        self._share(sequence, end)

    def forget(self, adapter: ServedAdapter) -> None:
        """Drop the blocks of an adapter that is removed, replaced or changed.

        What requests that run read stays until they end.
        """
        version = self._versions.pop(adapter, None)
        if version is not None:
            self._drop(version)

    def clear(self) -> None:
        """Drop all blocks."""
        for version in (self._base, *self._versions.values()):
            self._drop(version)
        self._versions.clear()
        self._base = Version()

    def check_integrity(self) -> None:
        """AssertionError: a block is not where its version says, or its page is not shared."""
        shared = set(self._pool.shared)
        for page, (version, digest) in self._blocks.items():
            assert version.is_current
            assert version.pages[digest] == page
            assert page in shared
        for version in (self._base, *self._versions.values()):
            assert version.is_current
            assert set(version.pages.values()) <= self._blocks.keys()

    def _share(self, sequence: Sequence, end: int) -> None:
        """Share a sequence's full blocks up to a token.

        Where another filled the same block first, that one's takes the place of its own.
        """
        table, version = sequence.table, sequence.version
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
                return  # it writes the block in this step

    def _version(self, adapter: ServedAdapter | None) -> Version:
        if adapter is None:
            return self._base
        return self._versions.setdefault(adapter, Version())

    def _digest(self, sequence: Sequence, place: int) -> bytes:
        """Of a block, all of whose tokens are known."""
        digests = sequence.digests
        if place >= len(digests):
            first, last = len(digests), sequence.length // PAGE_TOKENS
            ids = array("q", sequence.ids(first * PAGE_TOKENS, last * PAGE_TOKENS))
            for start in range(0, len(ids), PAGE_TOKENS):
                before = digests[-1] if digests else b""
                block = ids[start : start + PAGE_TOKENS].tobytes()
                digests.append(sha256(before + block).digest())
        return digests[place]

    @staticmethod
    def _found(sequence: Sequence) -> int:
        """Tokens of the prompt behind what was known of it that are in the cache, uncomputed."""
        request = sequence.request
        start = max(sequence.known, request.virtual_tokens)
        return max(min(sequence.cached, request.length) - start, 0)

    def _drop(self, version: Version) -> None:
        version.is_current = False
        for page in version.pages.values():
            del self._blocks[page]
            self._pool.forget(page)
        version.pages.clear()

    def _reclaimed(self, page: int) -> None:
        version, digest = self._blocks.pop(page)
        del version.pages[digest]

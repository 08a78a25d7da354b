"""Snapshots of recurrent states, from which prompts with a common prefix go on.

Keys and values of a prefix are found block by block. A recurrent state is of one number of tokens,
and as large as the keys and values of hundreds, so few are kept: at the last multiple of
`SNAPSHOT_TOKENS` of a prompt, for the next turn of a chat, and at the last multiple within the
blocks that earlier prompts had, where a common prefix ends. A prompt with a new prefix leaves
blocks, the second prompt leaves a snapshot at their end, and the third goes on from it.

A snapshot has a slot, and belongs to a version of an adapter, as blocks do. The step that computes
a prompt writes its snapshots, so that they are found from the next step on. The least recently used
one makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pcg.ir.operators.recurrent import CHUNK
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.requests.sequence import Sequence, Version

SNAPSHOT_TOKENS = CHUNK
"""Recurrences end a chunk there anyway; a multiple of a block's tokens."""


class Snapshots:
    """The slots of snapshots, and the snapshots that the present step writes."""

    def __init__(self, slots: range) -> None:
        self._slots = slots
        self._free: list[int] = [*slots]
        self._held: OrderedDict[int, tuple[Version, bytes]] = OrderedDict()
        self._planned: dict[int, tuple[Version, bytes]] = {}

    def use(self, slot: int) -> None:
        """Note that a sequence goes on from a snapshot."""
        self._held.move_to_end(slot)

    def plan(self, sequence: Sequence, end: int, digest_of: Callable[[int], bytes]) -> None:
        """Let the step that runs a sequence up to token `end` keep states of its prompt.

        Args:
            digest_of: returns the digest of a block of the sequence.
        """
        table, version = sequence.table, sequence.blocks.version
        assert table is not None
        assert version is not None
        ends = sequence.blocks.common, sequence.request.length - 1
        places = {n // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS for n in ends}
        kept = []
        for tokens in sorted(place for place in places if sequence.cached < place <= end):
            digest = digest_of(tokens // PAGE_TOKENS - 1)
            is_planned = any(v is version and d == digest for v, d in self._planned.values())
            is_known = is_planned or digest in version.states
            slot = self._take() if version.is_current and not is_known else None
            if slot is not None:
                kept.append((tokens, slot))
                self._planned[slot] = version, digest
        table.snapshots = kept

    def launched(self) -> None:
        """Let later steps find the snapshots of the launched step."""
        for slot, (version, digest) in self._planned.items():
            if version.is_current:
                version.states[digest] = slot
                self._held[slot] = version, digest
            else:
                self._free.append(slot)
        self._planned.clear()

    def drop(self, version: Version) -> None:
        """Free the snapshots of a version that is no longer current."""
        for slot in version.states.values():
            del self._held[slot]
            self._free.append(slot)
        version.states.clear()

    def reset(self) -> None:
        """Drop all snapshots, after a failed step."""
        self._free = [*self._slots]
        self._held.clear()
        self._planned.clear()

    def check_integrity(self) -> None:
        """Raise an AssertionError if a slot is lost or held twice."""
        slots = [*self._free, *self._held, *self._planned]
        assert sorted(slots) == list(self._slots), "a slot of a snapshot is lost, or held twice"
        for slot, (version, digest) in self._held.items():
            assert version.is_current
            assert version.states[digest] == slot

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._held:
            return None
        slot = next(iter(self._held))
        version, digest = self._held.pop(slot)
        del version.states[digest]
        return slot

"""Rooms: the sizes of recorded steps, rounded up so that few graphs serve every step.

A CUDA graph keeps the addresses of its tensors and the numbers of its programs for good. So a graph
is recorded for a room, and serves each step that the room holds: the rest of it is
tokens that no kernel writes, and programs that end immediately.

    decode    a token of each sequence; logits of all
    mixed     chunks of prompts, with or without such tokens; logits after some sequences

Rooms of mixed steps are fewer and rounded up further: their products take longer than empty
programs. Which rooms an engine's steps can need is known before the first step (`StepRooms.all`).

A graph keeps memory and takes time to record, so where an engine's steps can need more than
`MOST_ROOMS`, some are left out of the warm-up: their steps run in the next larger room. With the
time t of a layer's step in a room r, and the cheapest room h that holds it, the room is left out
that loses least, room by room:

    loss    (t(h) - t(r)) / t(r)        steps are assumed to be equally frequent in all rooms
    t       max(WEIGHTS_US, TOKEN_US · tokens) + MOVED_US · tokens + SPLIT_US · (splits + tiles)
            + ADAPTER_US · (adapter tiles + wide)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple, Self

import numpy as np

from pcg.kernels.sizes import PAGE_TOKENS, RANK_STEP
from pcg.kernels.triton.adapters.token_tiles import (
    DECODE_BLOCK,
    PREFILL_BLOCK,
    TileCapacity,
    rank_block,
)
from pcg.kernels.triton.attention.work import (
    SPLIT_KEYS,
    TILE_ROWS,
    Rows,
    WorkCapacity,
    split_counts,
)

DECODE_TOKENS = (1, 2, 4, *range(8, 257, 8))
"""Tokens of decode rooms. From 8 on in steps of 8: products of so few tokens take as long as
weights take to be read, so that what is padded costs next to nothing."""
MIXED_TOKENS = (
    *range(16, 65, 16),
    *range(96, 257, 32),
    *range(320, 513, 64),
    *(octave * eighth // 8 for octave in (512, 1024, 2048, 4096) for eighth in range(9, 17)),
)
"""Tokens of mixed rooms. From 512 on, where products take what they compute, 8 to an octave: at
most 12 % more than are needed, and 6 % in the mean."""
_LEAST_SEQUENCES = 16
_SEQUENCES_FACTOR = 16
"""Sequences of mixed rooms are 16, 256, …: an empty part costs a program that ends at once."""
_DECODE_SPLITS_FACTOR, _MIXED_SPLITS_FACTOR = 4, 16
"""Splits of a room to those of the next smaller one."""
_TILES_FACTOR = 4
"""Tiles of a decode room with adapters to those of the next smaller one."""
_LEAST_WIDE, _WIDE_FACTOR = 16, 4
"""Blocks of ranks beyond the first of a decode room's wide adapters: 16, 64, …"""
_MOST_WIDTH = 256
"""Width of adapters that lists have room for before any has come."""


class StepRoom(NamedTuple):
    """The sizes of a recorded step's memory.

    Attributes:
        sequences: as many as tokens in a decode step.
        splits: splits of the keys of sequences with a single token: as many as sequences where each
            has one, and more where some have several.
        tiles: tiles of the rows of sequences that have more; 0 in a decode step.
        adapter_tiles: tiles of tokens by adapter; 0 for steps without adapters.
        widest: blocks of 16 ranks beyond the first of the widest adapter.
        wide: the sum of these over the adapters of all tokens; 0 in a mixed step.
    """

    tokens: int
    sequences: int
    splits: int
    tiles: int
    adapter_tiles: int
    widest: int
    wide: int

    @property
    def decodes(self) -> bool:
        """True if each sequence has a single token."""
        return not self.tiles

    def attention(self, pages: int) -> WorkCapacity:
        """The sizes of attention's lists, for block tables of `pages` pages."""
        return WorkCapacity(
            self.sequences, pages, self.tiles, self.splits, self.sequences, key_blocks=0
        )

    @property
    def block(self) -> int:
        """Places of a tile of tokens by adapter."""
        return DECODE_BLOCK if self.decodes else PREFILL_BLOCK

    @property
    def by_adapter(self) -> TileCapacity:
        """The sizes of the lists of tokens by adapter."""
        if not self.adapter_tiles:
            return TileCapacity()
        tokens, tiles = self.tokens, self.adapter_tiles
        if self.decodes:
            sums = RANK_STEP * (tokens + self.wide)
            return TileCapacity(tokens, tiles=tiles, wide_tiles=self.wide, tokens=tokens, sums=sums)
        wide = tiles * (-(-self.width // rank_block(self.block)) - 1)
        return TileCapacity(tokens, tiles=tiles, wide_tiles=wide, sums=tokens * self.width)

    @property
    def rows_by_adapter(self) -> TileCapacity:
        """The sizes of the lists of the rows of logits of a mixed step."""
        if self.decodes or not self.adapter_tiles:
            return TileCapacity()
        count, wide = self.sequences, self.sequences * self.widest
        sums = count * self.width
        return TileCapacity(count, tiles=count, wide_tiles=wide, tokens=count, sums=sums)

    @property
    def width(self) -> int:
        return RANK_STEP * (1 + self.widest)

    def holds(self, other: Self) -> bool:
        """Return whether the graph of this room serves the steps of another room."""
        is_reduced, has_several = (room.splits > room.sequences for room in (self, other))
        return (
            self.decodes == other.decodes
            and is_reduced >= has_several
            and all(size >= needed for size, needed in zip(self, other, strict=True))
        )


class StepSizes(NamedTuple):
    """The sizes of a step, by which its room is chosen.

    Attributes:
        lengths: tokens of each sequence in the step.
        contexts: tokens of each sequence before these, in the cache.
        adapter_tiles: tiles of `DECODE_BLOCK` tokens by adapter; 0 without adapters.
        widest: blocks of ranks beyond the first of the widest adapter; `wide` of all tokens'.
    """

    lengths: Sequence[int]
    contexts: Sequence[int]
    adapter_tiles: int
    widest: int = 0
    wide: int = 0


@dataclass(frozen=True)
class StepRooms:
    """The rooms of an engine's steps.

    Attributes:
        sequences: the most sequences of a step.
        tokens: the most tokens of a step.
        pages: the most pages of a sequence.
        pool_pages: pages of the cache.
        group: heads that share a KV head; 0 if they differ by layer, and only decode steps have
            rooms.
        has_adapters: True if steps may have adapters in rows.
        widest: the greatest width of known adapters; rooms of wider ones are not among `all`.
    """

    sequences: int
    tokens: int
    pages: int
    pool_pages: int
    group: int
    has_adapters: bool
    widest: int = RANK_STEP

    def of(self, sizes: StepSizes) -> StepRoom | None:
        """Return the room of a step; None for a step without tokens or with too many."""
        lengths, contexts = (
            np.array(numbers, np.int64) for numbers in (sizes.lengths, sizes.contexts)
        )
        tokens, sequences = int(lengths.sum()), len(lengths)
        if not 0 < tokens <= self.tokens or sequences > self.sequences:
            return None
        counts = split_counts(contexts[lengths == 1] + 1)
        if tokens == sequences and tokens <= DECODE_TOKENS[-1]:
            most = DECODE_TOKENS[bisect_left(DECODE_TOKENS, tokens)]
            tiles = 0
            if sizes.adapter_tiles:
                tiles = min(_power(sizes.adapter_tiles, max(1, most // 16), _TILES_FACTOR), most)
            splits = _power(_splits_of(counts, most), most, _DECODE_SPLITS_FACTOR)
            wide = _power(sizes.wide, _LEAST_WIDE, _WIDE_FACTOR) if sizes.wide else 0
            return StepRoom(most, most, splits, 0, tiles, _widest(sizes.widest), wide)
        if not self.group or tokens > MIXED_TOKENS[-1]:
            return None
        most = MIXED_TOKENS[bisect_left(MIXED_TOKENS, tokens)]
        count = min(_power(sequences, _LEAST_SEQUENCES, _SEQUENCES_FACTOR), self.sequences)
        splits = _power(_splits_of(counts, count), count, _MIXED_SPLITS_FACTOR)
        return self._mixed(most, count, splits, bool(sizes.adapter_tiles), sizes.widest)

    def _mixed(
        self, tokens: int, sequences: int, splits: int, has_adapters: bool, widest: int
    ) -> StepRoom:
        # However the tokens are cut into sequences, each may end in a tile that is not full.
        tiles = -(-tokens * self.group // TILE_ROWS) + sequences
        adapter_tiles = sequences + tokens // PREFILL_BLOCK if has_adapters else 0
        return StepRoom(tokens, sequences, splits, tiles, adapter_tiles, _widest(widest), 0)

    @cached_property
    def all(self) -> tuple[StepRoom, ...]:
        """Rooms that hold every step, the largest first.

        Each step is held by a room that is little larger: of tokens there are all sizes, of
        sequences, splits and tiles those worth a graph.
        """
        return *self._mixed_rooms(), *self._decode_rooms()

    def _mixed_rooms(self) -> Iterator[StepRoom]:
        for most in reversed(_up_to(MIXED_TOKENS, self.tokens)) if self.group else ():
            running = min(self.sequences, most)
            counts = _powers(_LEAST_SEQUENCES, running, _SEQUENCES_FACTOR)
            for count in dict.fromkeys(min(count, self.sequences) for count in counts):
                splits = _powers(count, self._most_splits(count), _MIXED_SPLITS_FACTOR)
                wides = dict.fromkeys((self.widest // RANK_STEP - 1, 0))
                for split, (has_adapters, wide) in product(splits, self._of_adapters(wides)):
                    yield self._mixed(most, count, split, has_adapters, wide)

    def _decode_rooms(self) -> Iterator[StepRoom]:
        for most in reversed(_up_to(DECODE_TOKENS, min(self.sequences, self.tokens))):
            splits = _powers(most, self._most_splits(most), _DECODE_SPLITS_FACTOR)
            widest, wides = _widest(self.widest // RANK_STEP - 1), [0]
            if widest:
                wides = [*_powers(_LEAST_WIDE, most * widest, _WIDE_FACTOR), 0]
            for split, (has_adapters, wide) in product(splits, self._of_adapters(wides)):
                tiles = most if has_adapters else 0
                yield StepRoom(most, most, split, 0, tiles, widest if wide else 0, wide)

    @property
    def largest(self) -> StepRoom:
        """A room that is as large as any in each of its sizes, with adapters of rank 256."""
        rooms = replace(self, widest=max(self.widest, _MOST_WIDTH))
        return StepRoom(*map(max, zip(*rooms.all, strict=True)))

    def _of_adapters(self, wides: Iterable[int]) -> list[tuple[bool, int]]:
        return [*((True, wide) for wide in wides if self.has_adapters), (False, 0)]

    def _most_splits(self, sequences: int) -> int:
        """Return the most splits of some sequences: of long ones, or of all that the cache has.

        Sequences that share pages may have more; their steps run eagerly.
        """
        running = min(sequences, self.sequences)
        longest = int(split_counts(np.array(self.pages * PAGE_TOKENS)))
        if longest == 1:
            return running
        pooled = running + self.pool_pages * PAGE_TOKENS // SPLIT_KEYS
        return max(min(running * longest, pooled), sequences + 1)


def _splits_of(counts: Rows, sequences: int) -> int:
    """Return the sum of splits: more than sequences if some token has several."""
    has_several = bool((counts > 1).any())
    return max(int(counts.sum()), sequences + 1 if has_several else 0)


def _widest(blocks: int) -> int:
    """Round a width up to a power of two; return its blocks beyond the first."""
    return _power(1 + blocks, 1, 2) - 1


def _power(needed: int, least: int, factor: int) -> int:
    """Return the least of `least`, `least · factor`, … that is enough."""
    while least < needed:
        least *= factor
    return least


def _powers(least: int, most: int, factor: int) -> list[int]:
    """Return `least`, `least · factor`, … up to the first that is enough, the largest first."""
    powers = [least]
    while powers[-1] < most:
        powers.append(powers[-1] * factor)
    return powers[::-1]


def _up_to(sizes: Sequence[int], most: int) -> Sequence[int]:
    return sizes[: bisect_left(sizes, most) + 1]


MOST_ROOMS = 256
"""The most rooms of a warm-up. An engine of 256 sequences and 4,096 tokens a step, whose adapters
have ranks of up to 16, has 450 to 550, and more with higher ranks; of these 256, steps are expected
to lose at most 4 % and 1 % in the mean."""
WEIGHTS_US, TOKEN_US = 100.0, 0.55
"""A layer of Llama-3.1-8B on an H200: 436 MB at 4.3 TB/s, and 436 MFLOP a token at 790 TFLOP/s."""
MOVED_US = 0.045
"""What is moved of a token: some 190 KB a layer, a part of its logits among them."""
SPLIT_US, ADAPTER_US = 0.008, 0.03
"""Programs that end at once, of which a device runs about a thousand in a microsecond: one for each
of eight KV heads, and some 30 at the linears of a layer."""


def rooms_within(rooms: Sequence[StepRoom], most: int = MOST_ROOMS) -> tuple[StepRoom, ...]:
    """Return up to `most` of an engine's rooms, in their order, that hold all steps of these rooms.

    It returns more if that many hold steps that no other room does.
    """
    sizes = np.array(rooms, dtype=np.int64).reshape(len(rooms), len(StepRoom._fields))
    decodes = np.array([room.decodes for room in rooms])
    times = np.array([expected_us(room) for room in rooms])
    holds = (sizes[:, None, :] >= sizes[None, :, :]).all(-1) & (decodes[:, None] == decodes)
    np.fill_diagonal(holds, val=False)
    # The time of each room's steps in each room that holds them, infinite in others.
    others = np.where(holds, times[:, None], np.inf)
    is_there = np.ones(len(rooms), dtype=bool)
    while is_there.sum() > most:
        losses = np.where(is_there, others.min(0) / times - 1, np.inf)
        gone = int(losses.argmin())
        if not np.isfinite(losses[gone]):
            break
        is_there[gone] = False
        others[gone] = np.inf
    return tuple(room for room, stays in zip(rooms, is_there, strict=True) if stays)


def expected_us(room: StepRoom) -> float:
    """Return the expected time of a layer's step in a room, for comparisons."""
    empty = SPLIT_US * (room.splits + room.tiles) + ADAPTER_US * (room.adapter_tiles + room.wide)
    return max(WEIGHTS_US, TOKEN_US * room.tokens) + MOVED_US * room.tokens + empty

"""The work lists of a step: its tokens by adapter, as the segmented kernels read them.

Tokens are sorted by their adapters' slots, stably, so a slot's tokens are a segment of consecutive
places; those without an adapter have no place. A segment is cut into tiles of at most `block`
places (SGMV: Punica §4), and the ranks of its adapter into blocks. A program takes a single block
of a tile, so that a rank costs programs only to its adapter:

    order     [places]    the token at each place
    segments  [n, 8]      of each segment and block of 16 ranks: ITEM's numbers
    tiles     [n, 8]      the same of each tile, of blocks of 64 ranks where tiles are of 64
    by_token  [tokens, 4] where tokens decode: slot of each or -1, width, first row, first sum

The first blocks precede all others, so that kernels without blocks read a list's beginning. An
item is 8 numbers:

    slot, first place, places, width, first row, first sum, first rank, 0

Its adapter has `width` entries in the table of rows for each matrix, from `first row` on
(`RankRows`); the sums that shrink makes of its tokens, `width` of each, begin at `first sum`.

All lie in one int32 tensor on the CPU, so a step copies once. With sizes of a `TileCapacity` one
captured CUDA graph serves every step that fits. The rest of a capacity is empty: items of no places
and tokens of slot -1, whose programs end immediately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.batch import AdapterSlot
from pcg.kernels.devices import uploaded
from pcg.kernels.sizes import RANK_STEP

DECODE_BLOCK = 16
"""Places of a tile where segments have few tokens: the least that a tensor core's product takes."""

PREFILL_BLOCK = 64
"""Places of a tile where segments are long: the rows of one wgmma."""

ITEM = 8
"""Numbers of an item."""

OF_TOKEN = 4
"""Numbers of a token in `by_token`."""

TileSpan: TypeAlias = tuple[int, int, AdapterSlot]
"""Neighbouring tokens with one adapter: first token, tokens, slot."""


def rank_block(block: int) -> int:
    """Return the ranks of a program on tiles of `block` places."""
    return RANK_STEP if block == DECODE_BLOCK else 4 * RANK_STEP


@dataclass(frozen=True)
class TileCapacity:
    """The sizes of the lists.

    Attributes:
        places: tokens that have an adapter.
        segments: adapters that have tokens. Without room for segments these are left out, as no
            kernel of serving reads them.
        wide_segments: blocks of ranks beyond the first ones of segments; `wide_tiles` of tiles.
        tokens: all tokens, if tiles are of DECODE_BLOCK; else 0.
        sums: numbers that shrink makes in a part of a slice.
    """

    places: int = 0
    segments: int = 0
    wide_segments: int = 0
    tiles: int = 0
    wide_tiles: int = 0
    tokens: int = 0
    sums: int = 0

    @property
    def size(self) -> int:
        """Numbers in all lists together."""
        items = self.segments + self.wide_segments + self.tiles + self.wide_tiles
        return self.places + ITEM * items + OF_TOKEN * self.tokens

    @classmethod
    def of(cls, tokens: int, slots: int, block: int, width: int = RANK_STEP) -> TileCapacity:
        """Return the most that `tokens` tokens can need, whichever of the slots each has."""
        segments = min(tokens, slots)
        # Every segment may end in a tile that is not full.
        tiles = segments + (tokens - segments) // block
        more, wide = (-(-width // step) - 1 for step in (RANK_STEP, rank_block(block)))
        known = tokens if block == DECODE_BLOCK else 0
        return cls(tokens, segments, more * segments, tiles, wide * tiles, known, width * tokens)


@dataclass(frozen=True)
class TokenTiles:
    """The lists of a step, list by list in `memory`; a tile has at most `block` places.

    `width` is the greatest of the adapters that have tokens, if it is known, else RANK_STEP.
    """

    memory: Tensor
    capacity: TileCapacity
    block: int
    width: int = RANK_STEP

    @property
    def order(self) -> Tensor:
        return self.memory[: self.capacity.places]

    @property
    def segments(self) -> Tensor:
        count = self.capacity.segments + self.capacity.wide_segments
        return self._items(self.capacity.places, count)

    @property
    def tiles(self) -> Tensor:
        capacity = self.capacity
        before = capacity.segments + capacity.wide_segments
        return self._items(capacity.places + ITEM * before, capacity.tiles + capacity.wide_tiles)

    @property
    def by_token(self) -> Tensor:
        start = self.capacity.size - OF_TOKEN * self.capacity.tokens
        return self.memory[start:].view(-1, OF_TOKEN)

    def _items(self, start: int, count: int) -> Tensor:
        return self.memory[start : start + ITEM * count].view(-1, ITEM)

    def to(self, device: torch.device) -> TokenTiles:
        return replace(self, memory=uploaded(self.memory, device))


@dataclass(frozen=True)
class _Segment:
    slot: AdapterSlot
    place: int
    count: int
    sum_: int

    def item(self, offset: int, count: int, first_rank: int) -> list[int]:
        number, first, width = self.slot
        start = self.sum_ + offset * width
        return [number, self.place + offset, count, width, first, start, first_rank, 0]

    def items(self, block: int, ranks: range) -> Iterator[list[int]]:
        """Yield the items of its tiles, for blocks of ranks that begin at `ranks`."""
        for offset in range(0, self.count, block):
            count = min(block, self.count - offset)
            for first_rank in ranks:
                yield self.item(offset, count, first_rank)


def token_tiles(
    spans: Sequence[TileSpan], block: int, capacity: TileCapacity | None = None
) -> TokenTiles:
    """Sort the tokens of a step by slot, on the host.

    Args:
        spans: neighbouring tokens with the same adapter, or with NO_SLOT.
        block: places of a tile, at most: DECODE_BLOCK or PREFILL_BLOCK.
        capacity: sizes to fill up to; by default the needed sizes.
    Raises:
        CodegenError: spans share tokens, the capacity is too small, or no kernel takes such tiles.
    """
    if block not in (DECODE_BLOCK, PREFILL_BLOCK):
        raise CodegenError(f"a tile of {block} places; {DECODE_BLOCK} or {PREFILL_BLOCK} can be")
    sorted_spans = sorted(
        (slot, start, length) for start, length, slot in spans if slot[0] >= 0 and length
    )
    order = _order(sorted_spans)
    segments = _segments(sorted_spans)
    step = rank_block(block)
    firsts, more = [], []
    if capacity is None or capacity.segments:
        firsts = [segment.item(0, segment.count, 0) for segment in segments]
        more = [
            item
            for segment in segments
            for item in segment.items(segment.count, _ranks(segment.slot, RANK_STEP))
        ]
    tiles = [item for segment in segments for item in segment.items(block, range(1))]
    wide = [
        item for segment in segments for item in segment.items(block, _ranks(segment.slot, step))
    ]
    has_tokens = bool(sorted_spans) and block == DECODE_BLOCK
    tokens = max((start + length for start, length, _ in spans), default=0) if has_tokens else 0
    sums = sum(segment.count * segment.slot.width for segment in segments)
    needed = TileCapacity(len(order), len(firsts), len(more), len(tiles), len(wide), tokens, sums)
    capacity = capacity or needed
    for field, need, room in zip(fields(needed), astuple(needed), astuple(capacity), strict=True):
        if need > room:
            raise CodegenError(
                f"{need} {field.name} of tokens with adapters, and capacity for {room}; make that "
                "by TileCapacity.of as many tokens, slots and ranks"
            )
    width = max((segment.slot.width for segment in segments), default=RANK_STEP)
    lists = TokenTiles(torch.zeros(capacity.size, dtype=torch.int32), capacity, block, width)
    lists.order.numpy()[: len(order)] = order
    for list_, beginning, first, rest in (
        (lists.segments, capacity.segments, firsts, more),
        (lists.tiles, capacity.tiles, tiles, wide),
    ):
        for start, items in ((0, first), (beginning, rest)):
            if items:
                list_.numpy()[start : start + len(items)] = items
    if capacity.tokens:
        _write_tokens(lists.by_token.numpy(), segments, order)
    return lists


def tiles_on(spans: Sequence[TileSpan], device: torch.device) -> TokenTiles:
    """Return the lists on a device, of tiles that fit the tokens; see `token_tiles`."""
    slots = len({slot for _, _, slot in spans})
    is_decode = sum(length for _, length, _ in spans) <= DECODE_BLOCK * slots
    return token_tiles(spans, DECODE_BLOCK if is_decode else PREFILL_BLOCK).to(device)


def _ranks(slot: AdapterSlot, step: int) -> range:
    return range(step, slot.width, step)


def _segments(spans: Sequence[tuple[AdapterSlot, int, int]]) -> list[_Segment]:
    segments: list[_Segment] = []
    place = sum_ = 0
    for slot, _, length in spans:
        if segments and segments[-1].slot == slot:
            segments[-1] = replace(segments[-1], count=segments[-1].count + length)
        else:
            segments.append(_Segment(slot, place, length, sum_))
        place, sum_ = place + length, sum_ + length * slot.width
    return segments


def _write_tokens(by_token: np.ndarray, segments: Sequence[_Segment], order: np.ndarray) -> None:
    by_token[:, 0] = -1
    for segment in segments:
        number, first, width = segment.slot
        tokens = order[segment.place : segment.place + segment.count]
        by_token[tokens, :3] = number, width, first
        by_token[tokens, 3] = segment.sum_ + width * np.arange(segment.count)


def _order(spans: Sequence[tuple[AdapterSlot, int, int]]) -> np.ndarray:
    """Join the tokens of the spans. CodegenError: two spans share a token."""
    end = 0
    for start, length, slot in sorted((start, length, slot) for slot, start, length in spans):
        if start < end:
            raise CodegenError(
                f"{length} tokens from {start} with slot {slot.number} begin before the span in "
                f"front of them ends, at {end}; a token has one adapter at most"
            )
        end = start + length
    ranges = [np.arange(start, start + length, dtype=np.int32) for _, start, length in spans]
    return np.concatenate([np.empty(0, np.int32), *ranges])

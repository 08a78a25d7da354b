"""What attention's kernels are to do in one step: lists made on the host, copied at once.

A sequence's part of the batch is `length` tokens behind `context` tokens in the cache. Its rows are
its tokens times the G heads that share a KV head: row r is token r // G, head r % G of the group.
So a tile of rows is full for any group, and a short chunk of many heads is as good as a long one.

    tile        TILE_ROWS rows of a part: a program of the forward, and of dq
    split       about SPLIT_KEYS keys of a part of one token: a program of decoding
    key block   KEY_BLOCK keys that a part saw: a program of dk and dv

How a part is cut depends on that part alone, so what a token gets does not depend on who else is in
the batch. Lists may be padded with empty items, whose programs leave at once: a CUDA graph that is
captured with some `Room` runs every batch that fits into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pcg.errors import UnsupportedError

TILE_ROWS = 128
"""Rows of a tile; kernels may cut it further."""
KEY_BLOCK = 128
"""Keys of a block; kernels may cut it further."""
SPLIT_KEYS = 512
"""Keys of a split: 256 KiB of keys and values of one head of 128 in bf16, against 1 KiB a head of
what it leaves to the reduction; and 8 KV heads of one sequence of 8k keys are 128 programs."""
MOST_SPLITS = 64
"""Splits of a sequence: from 32k keys on they grow instead."""
COLUMNS = 4
"""Of an item: 16 bytes, so that every list starts as aligned as kernels expect."""


class Part(NamedTuple):
    """One sequence's tokens in the batch.

    Attributes:
        start: its first token in the batch.
        length: tokens in the batch.
        context: tokens before them, in the cache.
        pages: of the cache, in order, that hold all of these; none where there is no cache.
        origin: in training, its sequence's first token among those of the pass.
    """

    start: int
    length: int
    context: int = 0
    pages: Sequence[int] = ()
    origin: int = 0


@dataclass(frozen=True)
class Room:
    """How many items each list has, the empty ones included.

    Attributes:
        parts: of the batch.
        pages: of a part.
        tiles: of rows.
        splits: of keys, of all decoding tokens.
        decodes: decoding tokens.
        key_blocks: of backward; 0 where there is none.
    """

    parts: int
    pages: int
    tiles: int
    splits: int
    decodes: int
    key_blocks: int


@dataclass(frozen=True)
class AttentionWork:
    """Lists for the kernels, int32, on the device; all are views of one tensor.

    Attributes:
        flat: that tensor.
        room: how long the lists are.
        parts: start, length, context and origin of each, [parts, 4].
        pages: the block table of each part, [parts, pages up to a multiple of 16].
        tiles: part, first row, rows, [tiles, 4]; those that see most come first.
        splits: part, number of the split, splits of the part, [splits, 4].
        decodes: part, its first split in the list, how many it has, [decodes, 4].
        key_blocks: part, first key, keys, [key blocks, 4].
    """

    flat: Tensor
    room: Room
    parts: Tensor
    pages: Tensor
    tiles: Tensor
    splits: Tensor
    decodes: Tensor
    key_blocks: Tensor

    @classmethod
    def build(
        cls,
        parts: Sequence[Part],
        group: int,
        device: torch.device,
        *,
        backward: bool = False,
        room: Room | None = None,
    ) -> Self:
        """The lists of a batch, copied to the device.

        Args:
            parts: of the batch; one token of a sequence with pages is decoded, but for backward.
            group: heads that share a KV head, G.
            device: of the lists.
            backward: whether backward will read them: all parts have tiles, and key blocks.
            room: how long to make the lists; None for as long as they need to be.
        Raises:
            UnsupportedError: the batch does not fit into the room.
        """
        lists = _Lists.of(parts, group, backward)
        room = room or lists.room()
        flat = lists.flat(room, pinned=device.type == "cuda").to(device, non_blocking=True)
        return cls(flat, room, *_views(flat, room))

    def refill(self, parts: Sequence[Part], group: int) -> None:
        """Put another batch's lists where these are: what a captured graph reads.

        Raises:
            UnsupportedError: it does not fit into the room.
        """
        lists = _Lists.of(parts, group, backward=self.room.key_blocks > 0)
        host = lists.flat(self.room, pinned=self.flat.is_cuda)
        self.flat.copy_(host, non_blocking=True)


@dataclass(frozen=True)
class _Lists:
    """The lists on the host, each a list of rows."""

    parts: list[tuple[int, ...]]
    pages: list[Sequence[int]]
    tiles: list[tuple[int, ...]]
    splits: list[tuple[int, ...]]
    decodes: list[tuple[int, ...]]
    key_blocks: list[tuple[int, ...]]

    @classmethod
    def of(cls, parts: Sequence[Part], group: int, backward: bool) -> Self:
        tiles: list[tuple[int, ...]] = []
        splits: list[tuple[int, ...]] = []
        decodes: list[tuple[int, ...]] = []
        key_blocks: list[tuple[int, ...]] = []
        for number, part in enumerate(parts):
            keys = part.context + part.length
            if part.length == 1 and part.pages and not backward:
                count = min(-(-keys // SPLIT_KEYS), MOST_SPLITS)
                decodes.append((number, len(splits), count))
                splits += [(number, split, count) for split in range(count)]
            else:
                tiles += _pieces(number, part.length * group, TILE_ROWS)
            if backward:
                key_blocks += _pieces(number, keys, KEY_BLOCK)
        tiles.sort(key=lambda tile: -(parts[tile[0]].context + (tile[1] + tile[2] - 1) // group))
        spans: list[tuple[int, ...]] = [part[:3] + part[4:] for part in parts]
        return cls(spans, [part.pages for part in parts], tiles, splits, decodes, key_blocks)

    def room(self) -> Room:
        return Room(
            len(self.parts),
            max(map(len, self.pages), default=0),
            *map(len, (self.tiles, self.splits, self.decodes, self.key_blocks)),
        )

    def flat(self, room: Room, pinned: bool) -> Tensor:
        """All lists, one behind the other, padded with zeros to their room."""
        needed = self.room()
        for field in fields(Room):
            wanted, most = getattr(needed, field.name), getattr(room, field.name)
            if wanted > most:
                raise UnsupportedError(
                    f"the batch needs {wanted} {field.name} where there is room for {most}; "
                    f"take a graph of a larger room, or run it without one"
                )
        width = _width(room)
        found: list[int] = []
        for rows, count, columns in (
            (self.parts, room.parts, COLUMNS),
            (self.pages, room.parts, width),
            (self.tiles, room.tiles, COLUMNS),
            (self.splits, room.splits, COLUMNS),
            (self.decodes, room.decodes, COLUMNS),
            (self.key_blocks, room.key_blocks, COLUMNS),
        ):
            end = len(found) + count * columns
            found += chain.from_iterable((*row, *(0,) * (columns - len(row))) for row in rows)
            found += (0,) * (end - len(found))
        return torch.tensor(found, dtype=torch.int32, pin_memory=pinned)


def _pieces(number: int, whole: int, most: int) -> list[tuple[int, ...]]:
    """A part's rows or keys in pieces: part, first, how many."""
    return [(number, first, min(most, whole - first)) for first in range(0, whole, most)]


def _width(room: Room) -> int:
    """Columns of the block tables: kernels are compiled for multiples of 16."""
    return -(-room.pages // 16) * 16


def _views(flat: Tensor, room: Room) -> list[Tensor]:
    shapes = [(room.parts, COLUMNS), (room.parts, _width(room))]
    lists = (room.tiles, room.splits, room.decodes, room.key_blocks)
    shapes += [(count, COLUMNS) for count in lists]
    found = flat.split([rows * columns for rows, columns in shapes])
    return [some.view(shape) for some, shape in zip(found, shapes, strict=True)]

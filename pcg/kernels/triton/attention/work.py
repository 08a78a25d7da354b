"""The work of attention's kernels in a step: lists computed on the host, in a single copy.

A sequence's part of the batch is `length` tokens behind `context` tokens in the cache. Its rows are
its tokens times the G heads that share a KV head: row r is token r // G, head r % G of the group.
So a tile of rows is full for any group, and a short chunk of many heads is as good as a long one.

    tile        TILE_ROWS rows of a part: a program of the forward, and of dq
    split       about SPLIT_KEYS keys of a part with a single token, or all: a program of decoding
    key block   KEY_BLOCK keys that a part saw: a program of dk and dv

The cuts of a part depend only on that part, so a token's result does not depend on the rest of the
batch. Lists may be padded with empty items, whose programs end immediately: a CUDA graph that is
recorded with a `WorkCapacity` runs every batch that fits into it (`step_lists.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import Span
from pcg.kernels.devices import uploaded

# The sizes below follow from bytes under way; benchmarks/gpu_kernels.py times them.
TILE_ROWS = 128
"""Rows of a tile; kernels may cut it further."""
KEY_BLOCK = 128
"""Keys of a block; kernels may cut it further."""
SPLIT_KEYS = 512
"""Keys of a split: 256 KiB of keys and values of one head of 128 in bf16, against 1 KiB a head of
what it leaves to the reduction; and 8 KV heads of one sequence of 8k keys are 128 programs."""
WHOLE_KEYS = 1024
"""Keys up to which a token is one split, whose program writes what attention gives. Two programs of
512 keys would read them in half the time where little else runs, some 3 us on an H200 by count of
the bytes under way; their sums cost a launch, 4 us, and are written and read again."""
MOST_SPLITS = 64
"""Splits of a sequence: from 32k keys on they grow instead."""
COLUMNS = 4
"""Numbers of an item: 16 bytes, so that every list starts as aligned as kernels expect."""
Rows: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class WorkCapacity:
    """The number of items of each list, the empty ones included; `pages` is that of a part."""

    parts: int
    pages: int
    tiles: int
    splits: int
    decodes: int
    key_blocks: int

    @property
    def size(self) -> int:
        """Numbers in all lists together."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def is_whole(self) -> bool:
        """True if each decoding token is a single split, so that nothing is left to reduce."""
        return self.splits == self.decodes

    @property
    def shapes(self) -> list[tuple[int, int]]:
        # Kernels are compiled for block tables of a multiple of 16 columns.
        shapes = [(self.parts, COLUMNS), (self.parts, -(-self.pages // 16) * 16)]
        lists = (self.tiles, self.splits, self.decodes, self.key_blocks)
        return shapes + [(count, COLUMNS) for count in lists]


@dataclass(frozen=True)
class AttentionWork:
    """Lists for the kernels, int32; all are views of a tensor, `flat`.

    Attributes:
        parts: start, length, context and origin of each, [parts, 4].
        pages: the block table of each part, [parts, pages up to a multiple of 16].
        tiles: part, first row, rows, [tiles, 4]; those that see most are first.
        splits: part, number of the split, splits of the part, [splits, 4].
        decodes: part, its first split in the list, number of splits, [decodes, 4].
        key_blocks: part, first key, keys, [key blocks, 4].
        has_others: True if tokens of no part get zeros, also as gradients; else undefined values.
    """

    flat: Tensor
    capacity: WorkCapacity
    parts: Tensor
    pages: Tensor
    tiles: Tensor
    splits: Tensor
    decodes: Tensor
    key_blocks: Tensor
    has_others: bool = False

    @classmethod
    def build(
        cls,
        parts: Sequence[Span],
        group: int,
        device: torch.device,
        *,
        backward: bool = False,
        capacity: WorkCapacity | None = None,
    ) -> Self:
        """Make the lists of a batch, and copy them to the device.

        Args:
            parts: the batch's spans; one token of a sequence with pages is decoded.
            group: heads that share a KV head, G.
            device: the lists' device.
            backward: True if backward reads them: then all parts have tiles and key blocks.
            capacity: lengths of the lists; by default the needed lengths.
        Raises:
            UnsupportedError: the batch does not fit into the capacity.
        """
        lists = _Lists.of(parts, group, backward)
        capacity = capacity or lists.capacity()
        lists.check(capacity)
        host = cls.of(torch.zeros(capacity.size, dtype=torch.int32), capacity)
        lists.write(host)
        return cls.of(uploaded(host.flat, device), capacity)

    @classmethod
    def of(cls, flat: Tensor, capacity: WorkCapacity) -> Self:
        """Return the lists that lie in a tensor."""
        lists = flat.split([rows * columns for rows, columns in capacity.shapes])
        views = (some.view(shape) for some, shape in zip(lists, capacity.shapes, strict=True))
        return cls(flat, capacity, *views)

    @classmethod
    def beside(cls, pages: Tensor, flat: Tensor, capacity: WorkCapacity) -> Self:
        """Return the lists that lie in a tensor, with separate block tables, [parts, columns]."""
        return replace(cls.of(flat, capacity), pages=pages)


def split_lists(numbers: Rows, keys: Rows) -> tuple[Rows, Rows]:
    """Return splits [splits, 3] and decodes [n, 3] of parts with a single token."""
    counts = split_counts(keys)
    firsts = counts.cumsum() - counts
    which = np.arange(counts.sum()) - firsts.repeat(counts)
    splits = np.stack([numbers.repeat(counts), which, counts.repeat(counts)], 1)
    return splits, np.stack([numbers, firsts, counts], 1)


def split_counts(keys: Rows) -> Rows:
    """Return the splits of tokens that see `keys` keys each."""
    return np.where(keys <= WHOLE_KEYS, 1, np.minimum(-(-keys // SPLIT_KEYS), MOST_SPLITS))


def row_tiles(longer: Sequence[tuple[int, int, int]], group: int) -> list[tuple[int, ...]]:
    """Return tiles of parts (number, length, context): part, first row, rows."""
    tiles = [
        (context + (tile[1] + tile[2] - 1) // group, tile)
        for number, length, context in longer
        for tile in _pieces(number, length * group, TILE_ROWS)
    ]
    tiles.sort(key=lambda seen: -seen[0])
    return [tile for _, tile in tiles]


@dataclass(frozen=True)
class _Lists:
    """The lists on the host, each of rows."""

    parts: list[tuple[int, ...]]
    pages: list[Sequence[int]]
    tiles: list[tuple[int, ...]]
    splits: Rows
    decodes: Rows
    key_blocks: list[tuple[int, ...]]

    @classmethod
    def of(cls, parts: Sequence[Span], group: int, backward: bool) -> Self:
        longer: list[tuple[int, int, int]] = []
        decoding: list[int] = []
        key_blocks: list[tuple[int, ...]] = []
        for number, part in enumerate(parts):
            if part.length == 1 and part.table is not None and not backward:
                decoding.append(number)
            else:
                longer.append((number, part.length, part.context))
            if backward:
                key_blocks += _pieces(number, part.context + part.length, KEY_BLOCK)
        tiles = row_tiles(longer, group)
        keys = np.array([parts[number].context + 1 for number in decoding], np.int64)
        splits, decodes = split_lists(np.array(decoding, np.int64), keys)
        rows: list[tuple[int, ...]] = [(p.start, p.length, p.context, p.origin) for p in parts]
        pages: list[Sequence[int]] = [p.table.pages if p.table else () for p in parts]
        return cls(rows, pages, tiles, splits, decodes, key_blocks)

    def capacity(self) -> WorkCapacity:
        pages = max(map(len, self.pages), default=0)
        tokens = len(self.tiles), len(self.splits), len(self.decodes)
        return WorkCapacity(len(self.parts), pages, *tokens, len(self.key_blocks))

    def check(self, capacity: WorkCapacity) -> None:
        """Raise an UnsupportedError if the lists do not fit into the capacity."""
        needed = self.capacity()
        if capacity.is_whole and not needed.is_whole:
            raise UnsupportedError(
                f"the batch has tokens of several splits where there is capacity for one of each, "
                f"as they see more than {WHOLE_KEYS} keys; take a graph of a larger capacity"
            )
        for field in fields(WorkCapacity):
            wanted, most = getattr(needed, field.name), getattr(capacity, field.name)
            if wanted > most:
                raise UnsupportedError(
                    f"the batch needs {wanted} {field.name} where there is capacity for {most}; "
                    f"take a graph of a larger capacity, or run it without one"
                )

    def write(self, work: AttentionWork) -> None:
        for name in ("parts", "tiles", "splits", "decodes", "key_blocks"):
            put_rows(getattr(work, name).numpy(), getattr(self, name))
        tables = work.pages.numpy()
        for table, pages in zip(tables, self.pages, strict=False):
            table[: len(pages)] = pages


def put_rows(to: NDArray[Any], rows: Sequence[Sequence[int]] | Rows) -> None:
    """Write rows, which may be shorter, over the first ones."""
    if len(rows):
        to[: len(rows), : len(rows[0])] = rows


def _pieces(number: int, whole: int, most: int) -> list[tuple[int, ...]]:
    return [(number, first, min(most, whole - first)) for first in range(0, whole, most)]

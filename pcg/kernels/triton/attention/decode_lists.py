"""The tokens of a recorded decode step, in memory that stays and is filled for each step.

A CUDA graph keeps the addresses of its tensors and the numbers of its programs for good. So all
that changes from step to step lies in one tensor, which one copy fills:

    attention                     the lists of `work`; each token is decoded
    tiles, places                 tokens by adapter (`token_tiles`), and adapters by token
                                  (`token_places`); none without adapters
    input_ids, positions, rows    [tokens], int64; rows are the tokens' own in the cache

Their sizes are a `DecodeCapacity`, rounded up, so that few graphs serve every batch. The rest of it
is empty: tokens of no sequence have the id 0, no part, no place in the tiles and the row -1.

A sequence's block table is written as it grows, and tiles where adapters have changed places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.batch import BlockTable, DecodeTokens
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.triton.adapters import token_tiles
from pcg.kernels.triton.adapters.token_places import token_places
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles
from pcg.kernels.triton.attention import work as attention_work
from pcg.kernels.triton.attention.work import AttentionWork, put_rows, split_lists

TOKENS = (1, 2, 4, *range(8, 257, 8))
"""Batches that there is a graph for. From 8 on in steps of 8: products of so few tokens take as
long as weights take to be read, so that what is padded costs next to nothing."""
LEAST_PAGES = 64
"""Columns of a block table; from there on four times as many, as to copy them costs little: at 256
sequences of 16k tokens 1 MiB, 40 us of PCIe 4's 25 GB/s."""
ALIGNMENT = 4
"""Numbers that a part of the memory is a multiple of: 16 bytes, as kernels expect."""


class DecodeCapacity(NamedTuple):
    """The sizes of a step's memory: tokens, pages of a sequence, splits of all keys, and tiles."""

    tokens: int
    pages: int
    splits: int
    tiles: int

    @property
    def attention(self) -> attention_work.WorkCapacity:
        return attention_work.WorkCapacity(self.tokens, self.pages, 0, self.splits, self.tokens, 0)

    @property
    def by_adapter(self) -> token_tiles.TileCapacity:
        return token_tiles.TileCapacity(self.tokens if self.tiles else 0, self.tiles, self.tiles)


def decode_room(tokens: DecodeTokens) -> DecodeCapacity | None:
    """The capacity for these tokens and many others; None for more tokens than any graph has."""
    count = len(tokens.ids)
    if not 0 < count <= TOKENS[-1]:
        return None
    most = TOKENS[bisect_left(TOKENS, count)]
    pages = max(len(table.pages) for table in tokens.tables)
    splits, _ = _splits(tokens)
    tiles = sum(-(-length // DECODE_BLOCK) for _, length, slot in _spans(tokens) if slot >= 0)
    return DecodeCapacity(
        most,
        _power(pages, LEAST_PAGES, 4),
        _power(len(splits), most, 2),
        min(_power(tiles, 1, 2), most) if tiles else 0,
    )


def _power(needed: int, least: int, factor: int) -> int:
    """The least of `least`, `least · factor`, … that is enough."""
    while least < needed:
        least *= factor
    return least


def _splits(tokens: DecodeTokens) -> tuple[attention_work.Rows, attention_work.Rows]:
    contexts = np.array(tokens.contexts, np.int64)
    return split_lists(np.arange(len(contexts)), contexts + 1)


def _spans(tokens: DecodeTokens) -> list[tuple[int, int, int]]:
    """First token, tokens and slot of neighbours with one adapter."""
    spans, start = [], 0
    for slot, own in groupby(tokens.slots):
        length = len(list(own))
        spans.append((start, length, slot))
        start += length
    return spans


class _Parts(NamedTuple):
    """The parts of the memory, on the host or the device."""

    input_ids: Tensor
    positions: Tensor
    rows: Tensor
    attention: AttentionWork
    tiles: Tensor
    places: Tensor

    @classmethod
    def of(cls, memory: Tensor, capacity: DecodeCapacity) -> _Parts:
        columns = [memory[start : start + size] for start, size in _places(capacity)]
        ids, positions, rows = (column.view(torch.int64) for column in columns[:3])
        attention = AttentionWork.of(columns[3], capacity.attention)
        return cls(ids, positions, rows, attention, columns[4], columns[5].view(-1, 2))


def _places(capacity: DecodeCapacity) -> list[tuple[int, int]]:
    """The first number and the size of each part, in int32."""
    by_adapter = capacity.by_adapter
    sizes = [2 * capacity.tokens] * 3
    sizes += [capacity.attention.size, by_adapter.size, 2 * by_adapter.places]
    places, start = [], 0
    for size in sizes:
        places.append((start, size))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return places


class DecodeLists:
    """The memory of recorded decode steps, on the host and the device.

    `input_ids`, `positions`, `rows`, `attention` and `tiles`, which are None without adapters, are
    on the device.
    """

    def __init__(self, capacity: DecodeCapacity, device: torch.device) -> None:
        self.capacity = capacity
        start, size = _places(capacity)[-1]
        self._on_host = torch.zeros(start + size, dtype=torch.int32)
        self._memory = self._on_host.to(device, copy=True)
        self._host = _Parts.of(self._on_host, capacity)
        found = _Parts.of(self._memory, capacity)
        self.input_ids, self.positions, self.rows, self.attention, tiles, places = found
        by_adapter = TokenTiles(tiles, capacity.by_adapter, DECODE_BLOCK, places)
        self.tiles = by_adapter if capacity.tiles else None
        # For each row of the block tables: its sequence's table, how many of whose pages were
        # replaced by then, and how many pages of it are written.
        self._written: list[tuple[BlockTable | None, int, int]] = [(None, 0, 0)] * capacity.tokens
        self._slots: list[int] = []

    def fill(self, tokens: DecodeTokens) -> None:
        """Put tokens there that `decode_room` gives this capacity for; the host does not wait."""
        host, count = self._host, len(tokens.ids)
        contexts = np.array(tokens.contexts, np.int64)
        last = [
            table.pages[context // PAGE_TOKENS]
            for table, context in zip(tokens.tables, tokens.contexts, strict=True)
        ]
        rows = PAGE_TOKENS * np.array(last, np.int64) + contexts % PAGE_TOKENS
        for to, values, rest in (
            (host.input_ids.numpy(), tokens.ids, 0),
            (host.positions.numpy(), contexts, 0),
            (host.rows.numpy(), rows, -1),
        ):
            to[:count], to[count:] = values, rest
        numbers = np.arange(count)
        parts = np.stack([numbers, np.ones(count, np.int64), contexts], 1)
        for list_, filled in zip(
            (host.attention.parts, host.attention.splits, host.attention.decodes),
            (parts, *_splits(tokens)),
            strict=True,
        ):
            list_.zero_()
            put_rows(list_.numpy(), filled)
        self._write_tables(tokens.tables)
        slots = list(tokens.slots)
        if self.tiles is not None and slots != self._slots:
            self._slots = slots
            spans, capacity = _spans(tokens), self.capacity.by_adapter
            found = token_tiles.token_tiles(spans, DECODE_BLOCK, capacity)
            host.tiles.copy_(found.memory)
            host.places.copy_(token_places(spans, capacity.places))
        # The host's memory is written again while the device may still read what was copied.
        on_host = self._on_host.pin_memory() if self._memory.is_cuda else self._on_host
        self._memory.copy_(on_host, non_blocking=True)

    def _write_tables(self, tables: Sequence[BlockTable]) -> None:
        pages = self._host.attention.pages.numpy()
        for number, table in enumerate(tables):
            known, replaced, start = self._written[number]
            if known is not table or replaced != table.replaced:
                start = 0
            stop = len(table.pages)
            if start < stop:
                pages[number, start:stop] = table.pages[start:stop]
                self._written[number] = table, table.replaced, stop

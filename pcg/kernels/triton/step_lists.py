"""The tokens of recorded steps, in memory that stays and is filled for each step.

Data that changes from step to step lies in two tensors. One holds block tables, and only their new
entries are copied; the other all the rest, and one copy fills the part of the step's room:

    input_ids, positions, rows    [tokens], int64; rows are the tokens' in the cache
    read                          [sequences], int64; the tokens behind which logits are read
    attention                     the lists of `attention/work.py`
    tiles, row_tiles              tokens, and the read rows, by adapter (`token_tiles`)

A room says how long they are (`step_rooms.py`), and all rooms begin at the same address, as one
graph runs at a time. The rest of a room is empty: tokens of no sequence have the id 0, no part, no
place in the tiles and the row -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.batch import AdapterSlot, BlockTable, StepTokens
from pcg.kernels.devices import uploaded
from pcg.kernels.sizes import PAGE_TOKENS, RANK_STEP
from pcg.kernels.triton.adapters import token_tiles
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TileSpan, TokenTiles
from pcg.kernels.triton.attention.work import AttentionWork, Rows, put_rows, row_tiles, split_lists
from pcg.kernels.triton.step_rooms import StepRoom, StepSizes

ALIGNMENT = 4
"""Numbers that a part of the memory is a multiple of: 16 bytes, as kernels expect."""


class RoomLists(NamedTuple):
    """The lists of a room, on the host or the device; `attention` has the block tables, too."""

    input_ids: Tensor
    positions: Tensor
    rows: Tensor
    read: Tensor
    attention: AttentionWork
    tiles: TokenTiles | None
    row_tiles: TokenTiles | None


class StepLists:
    """The memory of recorded steps, on the host and the device.

    Args:
        room: a room that is as large as any in each of its sizes.
        pages: the most pages of a sequence.
        group: heads that share a KV head.
    """

    def __init__(self, room: StepRoom, pages: int, group: int, device: torch.device) -> None:
        self._group = group
        start, size = _places(room)[-1]
        self._on_host = torch.zeros(start + size, dtype=torch.int32)
        self._memory = self._on_host.to(device, copy=True)
        columns = -(-pages // 16) * 16  # as kernels are compiled for
        self._tables = torch.zeros((room.sequences, columns), dtype=torch.int32, device=device)
        # For each row of the block tables: its sequence's table, how many of whose pages were
        # replaced by then, and how many pages of it are written.
        self._written: list[tuple[BlockTable | None, int, int]] = [(None, 0, 0)] * room.sequences
        self._segments: object = None
        self._known: dict[StepRoom, tuple[RoomLists, int]] = {}

    @property
    def sequences(self) -> int:
        return len(self._tables)

    @property
    def size(self) -> int:
        return len(self._memory)

    def has_room(self, room: StepRoom) -> bool:
        start, size = _places(room)[-1]
        return room.sequences <= self.sequences and start + size <= self.size

    def of(self, room: StepRoom) -> RoomLists:
        return self._views(self._memory, room)

    def _views(self, memory: Tensor, room: StepRoom) -> RoomLists:
        columns = [memory[start : start + size] for start, size in _places(room)]
        ids, positions, rows, read = (column.view(torch.int64) for column in columns[:4])
        tables = self._tables[: room.sequences]
        work = AttentionWork.beside(tables, columns[4], room.attention(0))
        tiles = TokenTiles(columns[5], room.by_adapter, room.block, room.width)
        of_rows = TokenTiles(columns[6], room.rows_by_adapter, DECODE_BLOCK, room.width)
        return RoomLists(
            *(ids, positions, rows, read, work),
            tiles if room.by_adapter.places else None,
            of_rows if room.rows_by_adapter.places else None,
        )

    def fill(self, tokens: StepTokens, room: StepRoom) -> None:
        """Fill in tokens that the room holds; the host does not wait."""
        host, size = self._on_host_of(room)
        lengths, contexts = (np.array(x, np.int64) for x in (tokens.lengths, tokens.contexts))
        starts = lengths.cumsum() - lengths
        count = len(tokens.ids)
        positions = np.arange(count) + (contexts - starts).repeat(lengths)
        for to, values, rest in (
            (host.input_ids, tokens.ids, 0),
            (host.positions, positions, 0),
            (host.rows, _rows(tokens, lengths, starts, positions), -1),
            (host.read, [] if room.decodes else (starts + lengths - 1)[list(tokens.read)], 0),
        ):
            numbers = to.numpy()
            filled = len(values)
            numbers[:filled], numbers[filled:] = values, rest
        self._fill_work(host.attention, lengths, contexts, starts)
        self._fill_tiles(host, tokens, starts, room)
        self._write_tables(tokens.tables)
        # The host's memory is written again while the device may still read what was copied.
        on_host = self._on_host[:size]
        on_host = on_host.pin_memory() if self._memory.is_cuda else on_host
        self._memory[:size].copy_(on_host, non_blocking=True)

    def _on_host_of(self, room: StepRoom) -> tuple[RoomLists, int]:
        if room not in self._known:
            start, size = _places(room)[-1]
            self._known[room] = self._views(self._on_host, room), start + size
        return self._known[room]

    def _fill_work(self, work: AttentionWork, lengths: Rows, contexts: Rows, starts: Rows) -> None:
        singles, longer = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        tiles = row_tiles(
            [(i, int(lengths[i]), int(contexts[i])) for i in longer.tolist()], self._group
        )
        splits, decodes = split_lists(singles, contexts[singles] + 1)
        lists: tuple[tuple[Tensor, Rows | list[tuple[int, ...]]], ...] = (
            (work.parts, np.stack([starts, lengths, contexts], 1)),
            (work.tiles, tiles),
            (work.splits, splits),
            (work.decodes, decodes),
        )
        for to, rows in lists:
            to.zero_()
            put_rows(to.numpy(), rows)

    def _fill_tiles(
        self, host: RoomLists, tokens: StepTokens, starts: Rows, room: StepRoom
    ) -> None:
        """Write tokens by adapter, unless the last step had the same."""
        segments = room, tuple(tokens.slots), tuple(tokens.lengths), tuple(tokens.read)
        known, self._segments = self._segments, segments
        if host.tiles is None or segments == known:
            return
        spans = spans_of(starts.tolist(), tokens.lengths, tokens.slots)
        tiles = token_tiles.token_tiles(spans, room.block, room.by_adapter)
        host.tiles.memory.copy_(tiles.memory)
        if host.row_tiles is not None:
            slots = [tokens.slots[place] for place in tokens.read]
            spans = spans_of(range(len(slots)), [1] * len(slots), slots)
            tiles = token_tiles.token_tiles(spans, DECODE_BLOCK, room.rows_by_adapter)
            host.row_tiles.memory.copy_(tiles.memory)

    def _write_tables(self, tables: Sequence[BlockTable]) -> None:
        """Copy the missing pages of the rows of the block tables."""
        columns = self._tables.shape[1]
        places: list[int] = []
        pages: list[int] = []
        for number, table in enumerate(tables):
            known, replaced, start = self._written[number]
            if known is not table or replaced != table.replaced:
                start = 0
            stop = len(table.pages)
            if start < stop:
                places += range(number * columns + start, number * columns + stop)
                pages += table.pages[start:stop]
                self._written[number] = table, table.replaced, stop
        if places:
            numbers = uploaded(torch.tensor([places, pages]), self._tables.device)
            self._tables.view(-1).index_copy_(0, numbers[0], numbers[1].to(torch.int32))


def spans_of(
    starts: Sequence[int], lengths: Sequence[int], slots: Sequence[AdapterSlot]
) -> list[TileSpan]:
    """Return first token, tokens and slot of neighbours with the same adapter."""
    spans = []
    for slot, group in groupby(
        zip(starts, lengths, slots, strict=True), key=lambda entry: entry[2]
    ):
        neighbours = list(group)
        spans.append((neighbours[0][0], sum(length for _, length, _ in neighbours), slot))
    return spans


def sizes_of(tokens: StepTokens) -> StepSizes:
    """Return the sizes by which a step's room is chosen."""
    tiles = wide = widest = 0
    for _, length, slot in spans_of(tokens.lengths, tokens.lengths, tokens.slots):
        if slot.number >= 0:
            tiles += -(-length // DECODE_BLOCK)
            more = slot.width // RANK_STEP - 1
            wide, widest = wide + length * more, max(widest, more)
    return StepSizes(tokens.lengths, tokens.contexts, tiles, widest, wide)


def _rows(tokens: StepTokens, lengths: Rows, starts: Rows, positions: Rows) -> Rows:
    first = [
        table.pages[context // PAGE_TOKENS]
        for table, context in zip(tokens.tables, tokens.contexts, strict=True)
    ]
    pages = np.array(first, np.int64).repeat(lengths)
    for place in np.flatnonzero(lengths > 1).tolist():
        start, stop = int(starts[place]), int(starts[place] + lengths[place])
        table = np.array(tokens.tables[place].pages, np.int64)
        pages[start:stop] = table[positions[start:stop] // PAGE_TOKENS]
    return PAGE_TOKENS * pages + positions % PAGE_TOKENS


def _places(room: StepRoom) -> list[tuple[int, int]]:
    """Return the first number and the size of each list, in int32."""
    work = room.attention(0).size
    of_adapters = [room.by_adapter.size, room.rows_by_adapter.size]
    read = 0 if room.decodes else 2 * room.sequences
    places, start = [], 0
    for size in (*[2 * room.tokens] * 3, read, work, *of_adapters):
        places.append((start, size))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return places

"""Decode groups: sequences of one new token each, in groups that attention takes in one call.

Sequences whose rows of the cache lie at equal distances are one call; so are those whose rows are
scattered, which are gathered. A group's longest sequence may be at most twice as long as its mean:
reading masked rows costs less than another call. What the mask hides is read all the same, and a
NaN there would be in the result, so it is never another sequence's: shorter sequences read on into
free pages that are kept for them, which hold zeros, or read their own first row again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.kernels.batch import BlockTable, DecodeGroup
from pcg.kernels.sizes import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Singles:
    """Sequences of one new token each, by column.

    Attributes:
        tokens: their indices in the batch, [n].
        first_rows: row of each one's first token in the cache if its pages are a run, else -1, [n].
        stop_rows: the row after those of a run and of the free pages that are kept for it, [n].
        lengths: length of each, the new token included, [n].
    """

    tokens: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    stop_rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: Sequence[BlockTable]


def decode_groups(
    singles: Singles, window: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    """Group sequences.

    Args:
        window: the most rows that a token attends to; 0 for all.
    """
    if not len(singles.tokens):
        return []
    lengths, first_rows = singles.lengths, singles.first_rows
    counts = np.minimum(lengths, window) if window else lengths
    rows = np.where(first_rows < 0, -1, first_rows + lengths - counts)
    order = rows.argsort(kind="stable")
    counts = counts[order]
    rooms = singles.stop_rows - rows
    runs = list(_runs(rows[order].tolist(), counts.tolist(), rooms[order].tolist()))
    sizes = [run.size for run in runs]
    tokens = torch.from_numpy(singles.tokens[order]).to(device).split(sizes)
    most = max(run.longest for run in runs)
    line = torch.full((2 * most,), float("-inf"), dtype=dtype, device=device)
    line[:most] = 0.0
    hides = torch.from_numpy(most - counts).to(device).split(sizes)
    groups: list[DecodeGroup] = []
    start = 0
    for run, own, hidden in zip(runs, tokens, hides, strict=True):
        longest, mask, gathered = run.longest, None, None
        if run.total < longest * run.size:
            # Row i of these shows its first most - i places. They are windows of one line; copying
            # them takes a tenth of the time of comparing places with counts.
            windows = line.as_strided((most, longest), (1, 1))
            mask = windows.index_select(0, hidden).view(run.size, 1, 1, longest)
        row = run.row
        if row < 0:
            part = order[start : start + run.size]
            ends = zip(part.tolist(), lengths[part].tolist(), strict=True)
            tables = [(singles.tables[i], end) for i, end in ends]
            seen = counts[start : start + run.size].tolist()
            row, gathered = 0, _gathered(tables, seen, longest).to(device)
        groups.append(DecodeGroup(own, row, run.stride, longest, mask, gathered))
        start += run.size
    return groups


class _Run(NamedTuple):
    """Neighbours that are one group.

    Attributes:
        row: the first row that the first one attends to; -1 if they are gathered.
        stride: rows from one to the next; 0 if there is none, or they are gathered.
    """

    row: int
    size: int
    stride: int
    longest: int
    total: int


def _runs(rows: Sequence[int], counts: Iterable[int], rooms: Sequence[int]) -> Iterator[_Run]:
    """Yield the groups of sequences, by the first row, the length and the room of each."""
    size = stride = longest = total = 0
    first = before = rows[0]
    least = rooms[0]
    for row, count, room in zip(rows, counts, rooms, strict=True):
        step, most = row - before, max(longest, count)
        # The group takes this one if its distance is that of those before, or all are gathered.
        if before < 0:
            is_reached = row < 0
        else:
            is_reached = most <= min(least, room) and (size == 1 or step == stride)
        if size and not (is_reached and most * (size + 1) <= 2 * (total + count)):
            yield _Run(first, size, stride, longest, total)
            first, size, stride, most, total, least = row, 0, 0, count, 0, room
        elif size:
            stride = step
        size, longest, total, before = size + 1, most, total + count, row
        least = min(least, room)
    yield _Run(first, size, stride, longest, total)


def _gathered(
    ends: Iterable[tuple[BlockTable, int]], counts: Sequence[int], longest: int
) -> Tensor:
    """Return the rows that sequences attend to, [count, longest], padded by each one's first."""
    rows = np.empty((len(counts), longest), dtype=np.int64)
    within = np.arange(PAGE_TOKENS)
    for own, (table, end), count in zip(rows, ends, counts, strict=True):
        page, skipped = divmod(end - count, PAGE_TOKENS)
        pages = np.array(table.pages[page : -(-end // PAGE_TOKENS)])
        own[:count] = (pages[:, None] * PAGE_TOKENS + within).ravel()[skipped : skipped + count]
        own[count:] = own[0]
    return torch.from_numpy(rows)

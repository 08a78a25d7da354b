"""Sequences of one new token each, in groups that attention can take in one call.

Sequences whose rows of the cache lie at equal distances are one call; so are those whose rows lie
scattered, which are gathered. A group's longest sequence may be at most twice as long as its mean:
what is read in vain costs less than another call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pcg.runtime.page_pool import PageTable


class Single(NamedTuple):
    """A sequence of one new token.

    Attributes:
        row: of the first token that it attends to in the cache, where the pages are a run; -1 else.
        seen: tokens that it attends to.
        length: of the sequence, the new token included.
        token: its index in the batch.
        table: pages of the sequence.
    """

    row: int
    seen: int
    length: int
    token: int
    table: PageTable


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one new token each that attention takes in one call.

    Attributes:
        tokens: their indices in the batch, [count].
        row: first row that the first one attends to.
        stride: rows from one sequence's first to the next one's.
        longest: rows that the longest attends to.
        mask: [count, 1, 1, longest], added to the logits; None where all are equally long.
        rows: [count, longest], which rows they attend to, where these lie at no equal distances.
    """

    tokens: Tensor
    row: int
    stride: int
    longest: int
    mask: Tensor | None
    rows: Tensor | None = None


def single(token: int, length: int, table: PageTable, window: int) -> Single:
    """A sequence's token; see `Single`, and `decode_groups` for the window."""
    count = min(length, window) if window else length
    row = table.first_row + length - count if table.is_run else -1
    return Single(row, count, length, token, table)


def decode_groups(
    singles: Sequence[Single], cache_rows: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    """Group sequences.

    Args:
        singles: sequences.
        cache_rows: rows of the whole cache.
        dtype: of the masks, that of the cache.
        device: of all tensors.
    """
    ordered = sorted(singles, key=lambda one: one.row)
    if not ordered:
        return []
    runs = list(_runs(ordered, cache_rows))
    sizes = [run.size for run in runs]
    tokens = torch.tensor([one.token for one in ordered], device=device).split(sizes)
    counts = torch.tensor([one.seen for one in ordered], device=device)[:, None, None, None]
    places = torch.arange(max(run.longest for run in runs), device=device)
    shown, hidden = (torch.tensor(x, dtype=dtype, device=device) for x in (0.0, float("-inf")))
    groups: list[DecodeGroup] = []
    start = 0
    for run, own, lengths in zip(runs, tokens, counts.split(sizes), strict=True):
        group, longest, mask, rows = ordered[start : start + run.size], run.longest, None, None
        start += run.size
        if run.total < longest * run.size:
            mask = torch.where(places[:longest] < lengths, shown, hidden)
        row = group[0].row
        if row < 0:
            row, rows = 0, _gathered(group, longest).to(device)
        groups.append(DecodeGroup(own, row, run.stride, longest, mask, rows))
    return groups


class _Run(NamedTuple):
    """Neighbours that are one group.

    Attributes:
        size: how many.
        stride: rows from one to the next; 0 where there is none, or they are gathered.
        longest: tokens that the longest attends to.
        total: tokens that all of them attend to.
    """

    size: int
    stride: int
    longest: int
    total: int


def _runs(ordered: Sequence[Single], cache_rows: int) -> Iterator[_Run]:
    """The groups of sequences in the order of their rows."""
    size = stride = longest = total = 0
    before = ordered[0].row
    for row, count, *_ in ordered:
        step, most = row - before, max(longest, count)
        # One call reaches this one, too: at the distance of those before, or gathered as they are.
        if before < 0:
            is_reached = row < 0
        else:
            is_reached = step >= most and row + most <= cache_rows
            is_reached = is_reached and (size == 1 or step == stride)
        if size and not (is_reached and most * (size + 1) <= 2 * (total + count)):
            yield _Run(size, stride, longest, total)
            size, stride, most, total = 0, 0, count, 0
        elif size:
            stride = step
        size, longest, total, before = size + 1, most, total + count, row
    yield _Run(size, stride, longest, total)


def _gathered(group: Sequence[Single], longest: int) -> Tensor:
    """Rows that sequences attend to, [count, longest]; the first row behind their ends."""
    rows = torch.zeros((len(group), longest), dtype=torch.long)
    for i, one in enumerate(group):
        seen = one.table.rows(one.length - one.seen, one.length)
        rows[i, : one.seen] = torch.tensor(seen)
    return rows

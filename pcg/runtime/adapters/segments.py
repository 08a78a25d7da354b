"""Segments: which tokens of a batch use which adapter, and the weights as programs read them.

Where adapters of several widths run, a site's weights are a tuple of these, one for each width, and
None for a width of which no adapter has a weight there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcg.runtime.memory.uploads import uploaded


@dataclass(frozen=True)
class Segments:
    """The segments of tokens that use one adapter each.

    Segments of the most common size are one batched product, whose weights are read in place; its
    results for the slots of other adapters are dropped. Each other segment is a product of its own.

    Attributes:
        start: the first token that uses an adapter of these.
        stop: the end of these tokens.
        sizes: tokens of each adapter, in the order of the stacks; 0 if it does not run.
        size: the size of the segments in the batched product; 0 if there is none.
        gather: [adapters · size], the token, counted from start, of each row of the batched
            product; None if it has all tokens in order.
        tokens: the tokens of the batched product, counted from start; None likewise.
        places: the row of each of these tokens; None likewise.
        loose: index in the stacks, first token and end, counted from start, of each other segment.
        known: data that kernels derive from the segments, kept for all layers.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    size: int
    gather: Tensor | None = None
    tokens: Tensor | None = None
    places: Tensor | None = None
    loose: tuple[tuple[int, int, int], ...] = ()
    known: dict[object, Any] = field(default_factory=dict, compare=False)

    @property
    def is_batched(self) -> bool:
        """Whether all tokens are in the batched product, in order."""
        return bool(self.size) and self.gather is None


@dataclass(frozen=True)
class SegmentedWeight:
    """The weights of a batch's adapters at one site.

    Attributes:
        weight: [adapters, in, out], scaled; a bias is [adapters, 1, out]. A matrix is a transposed
            view, so that the weights of one output lie together.
        segments: which tokens use which adapter.
        present: whether each adapter has a weight here; its part of the stack is neutral otherwise.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class LoraRun:
    """B of neighbouring outputs of one size.

    Attributes:
        b: [adapters, outputs, out, rank], scaled.
        column: the first output's first column, among the columns with LoRA.
        row: the first output's first row, among the rows of the joined A's product.
        is_whole: whether the run covers all columns and all rows.
    """

    b: Tensor
    column: int
    row: int
    is_whole: bool


@dataclass(frozen=True)
class JoinedLora:
    """The LoRA of a batch's adapters at linear operators of one input.

    Attributes:
        column: the first column of the joined product that can have LoRA.
        columns: number of columns from there to the end of the last that can.
        a: [adapters, ranks, in], the ranks of all outputs one after the other.
        runs: B in as few runs as possible, including zeros between outputs.
        parts: B of each output by itself, without such zeros.
        segments: which tokens use which adapter.
    """

    column: int
    columns: int
    a: Tensor
    runs: tuple[LoraRun, ...]
    parts: tuple[LoraRun, ...]
    segments: Segments


def segments_of(start: int, sizes: Sequence[int], device: torch.device) -> Segments:
    """Make segments of these sizes, 0 included; tokens before `start` have no adapter."""
    stop = start + sum(sizes)
    counts = Counter(sizes)
    counts.pop(0, None)
    size, count = max(counts.items(), key=lambda item: item[1])
    if count == len(sizes):
        return Segments(start, stop, tuple(sizes), size)
    own = np.array(sizes)
    firsts = own.cumsum() - own
    is_batched = (own == size) & (count > 1 and 2 * count >= len(sizes))
    others = np.flatnonzero((own > 0) & ~is_batched)
    ends = firsts + own
    loose = zip(others.tolist(), firsts[others].tolist(), ends[others].tolist(), strict=True)
    if not is_batched.any():
        return Segments(start, stop, tuple(sizes), 0, loose=tuple(loose))
    batched, within = np.flatnonzero(is_batched), np.arange(size)
    tokens = (firsts[batched, None] + within).ravel()
    places = (batched[:, None] * size + within).ravel()
    gather = np.zeros(len(sizes) * size, dtype=np.int64)
    gather[places] = tokens
    gather_, tokens_, places_ = (
        uploaded(torch.from_numpy(x), device) for x in (gather, tokens, places)
    )
    return Segments(start, stop, tuple(sizes), size, gather_, tokens_, places_, tuple(loose))

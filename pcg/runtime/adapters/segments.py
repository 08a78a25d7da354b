"""Which tokens of a batch use which adapter, and the weights as emitted programs take them.

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
    """Which tokens use which adapter.

    Segments of the size that most have are one batched product, whose weights are read where they
    lie; what it computes for the slots of others is dropped. The others are products of their own.

    Attributes:
        start: of the tokens that use any; those before use none of these.
        stop: of these tokens.
        sizes: tokens of each adapter, in the order of the stacks; 0 where it does not run.
        size: of the segments in the batched product; 0 where none is.
        gather: [adapters · size], token, from start, of each row of the batched product; None where
            all tokens are in it, in order.
        tokens: those that are in the batched product, from start; None likewise.
        places: the row of each of these; None likewise.
        loose: index in the stacks, first token and end, from start, of each other segment.
        known: what kernels make of them, kept for all layers.
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
        """Whether all its tokens are in the batched product, in order."""
        return bool(self.size) and self.gather is None


@dataclass(frozen=True)
class SegmentedWeight:
    """One site's weights of the batch's adapters.

    Attributes:
        weight: [adapters, in, out], scaled; of a bias [adapters, 1, out]. A matrix is a transposed
            view: what one output is made of lies together.
        segments: which tokens use which.
        present: of each adapter, whether it has a weight here; its part of the stack is zeros else,
            or ones where the program scales by it.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class LoraRun:
    """B of neighbouring outputs of one size.

    Attributes:
        b: [adapters, outputs, out, rank], scaled.
        column: of the columns with LoRA, where the first output begins.
        row: of the joined A's products, where the first output's begin.
        is_whole: whether these are all columns and all rows.
    """

    b: Tensor
    column: int
    row: int
    is_whole: bool


@dataclass(frozen=True)
class JoinedLora:
    """The LoRA of the batch's adapters at linear operators of one input.

    Attributes:
        column: of the joined product, where the first output begins that can have LoRA.
        columns: from there on, to the end of the last.
        a: [adapters, ranks, in], the ranks of all outputs one behind the other.
        runs: B of the outputs that have one, in as few runs as can be, zeros between them included.
        parts: the same without such zeros.
        segments: which tokens use which adapter.
    """

    column: int
    columns: int
    a: Tensor
    runs: tuple[LoraRun, ...]
    parts: tuple[LoraRun, ...]
    segments: Segments


def segments_of(start: int, sizes: Sequence[int], device: torch.device) -> Segments:
    """Segments of these sizes; tokens before `start` have no adapter, and a size may be 0."""
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

"""The adapters of a batch as emitted programs and kernels read them; the runtime makes them.

A program's adapter parameter is a `SegmentedWeight`, a `JoinedLora` or `LoraRows`; None where no
adapter of the batch has a weight at the site; or a tuple of these where adapters of several widths
run. In training it is the one adapter's `pcg.peft.weights.AdapterWeight`, or a tensor made of some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.uploads import uploaded


class GatheredRows(NamedTuple):
    """The token of each row of a batched product, [adapters · size]; its tokens, and their rows."""

    gather: Tensor
    tokens: Tensor
    places: Tensor


@dataclass(frozen=True)
class Segments:
    """The tokens of each adapter.

    Segments of the size that most have are one batched product, whose results for the slots of
    others are dropped. The others are products of their own.

    Attributes:
        start: first token that uses any; stop is the end of these.
        sizes: tokens of each adapter, in the order of the stacks; 0 where it does not run.
        size: tokens of each segment in the batched product; 0 where there is none.
        gathered: rows of the batched product, tokens counting from start; None where there is none,
            or all tokens are in it, in order.
        loose: index in the stacks, first token and end, from start, of each other segment.
        known: tables that kernels make of them.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    size: int
    gathered: GatheredRows | None = None
    loose: tuple[tuple[int, int, int], ...] = ()
    known: dict[object, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, start: int, sizes: Sequence[int], device: torch.device) -> Self:
        """Segments of these sizes; tokens before `start` have no adapter, and a size may be 0."""
        stop = start + sum(sizes)
        counts = Counter(sizes)
        counts.pop(0, None)
        size, count = max(counts.items(), key=lambda item: item[1])
        if count == len(sizes):
            return cls(start, stop, tuple(sizes), size)
        own = np.array(sizes)
        firsts = own.cumsum() - own
        is_batched = (own == size) & (count > 1 and 2 * count >= len(sizes))
        others = np.flatnonzero((own > 0) & ~is_batched)
        ends = firsts + own
        loose = zip(others.tolist(), firsts[others].tolist(), ends[others].tolist(), strict=True)
        if not is_batched.any():
            return cls(start, stop, tuple(sizes), 0, loose=tuple(loose))
        batched, within = np.flatnonzero(is_batched), np.arange(size)
        tokens = (firsts[batched, None] + within).ravel()
        places = (batched[:, None] * size + within).ravel()
        gather = np.zeros(len(sizes) * size, dtype=np.int64)
        gather[places] = tokens
        rows = (uploaded(torch.from_numpy(x), device) for x in (gather, tokens, places))
        return cls(start, stop, tuple(sizes), size, GatheredRows(*rows), tuple(loose))

    @property
    def is_batched(self) -> bool:
        """True if all tokens are in the batched product, in order."""
        return bool(self.size) and self.gathered is None


@dataclass(frozen=True)
class SegmentedWeight:
    """One site's weights of the batch's adapters.

    Attributes:
        weight: [adapters, in, out], scaled; of a bias [adapters, 1, out]. A matrix is a transposed
            view: what one output is made of lies together.
        segments: the tokens of each.
        present: for each adapter, True if it has a weight here; else its part of the stack is
            zeros, or ones where the program scales by it.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class LoraRun:
    """B of neighbouring outputs of one size.

    Attributes:
        b: [adapters, outputs, out, rank], scaled; stored as [adapters, outputs, rank, out] where
            the native kernel reads it.
        column: the first output's first column, of the columns with LoRA.
        row: the first output's first row, of the joined A's products.
        is_whole: True if these are all columns and all rows.
    """

    b: Tensor
    column: int
    row: int
    is_whole: bool


@dataclass(frozen=True)
class JoinedLora:
    """The LoRA of the batch's adapters at linear operators of one input.

    Attributes:
        column: first column of the joined product that can have LoRA.
        columns: columns from there on, to the end of the last output that can have LoRA.
        a: [adapters, ranks, in], the ranks of all outputs one behind the other.
        runs: B of the outputs that have one, in as few runs as can be, zeros between them included.
        parts: the same without such zeros.
        known: tables that kernels make of these weights, for all steps.
    """

    column: int
    columns: int
    a: Tensor
    runs: tuple[LoraRun, ...]
    parts: tuple[LoraRun, ...]
    known: dict[str, Any]
    segments: Segments


class AdapterSlot(NamedTuple):
    """The place that an adapter has in tables.

    Attributes:
        number: its column in tables of ranks; -1 without an adapter.
        first: its first entry in the table of rows.
        width: entries of each of its matrices: its greatest rank anywhere, rounded up.
    """

    number: int
    first: int
    width: int


NO_SLOT = AdapterSlot(-1, 0, 0)
"""The slot of tokens without an adapter."""


@dataclass(frozen=True)
class TokenSpans:
    """First token, tokens and slot of neighbours with one adapter; `known` holds tables.

    Attributes:
        defers: True if LoRA may be left to the kernel that reads a product's sum.
    """

    spans: tuple[tuple[int, int, AdapterSlot], ...]
    defers: bool = True
    known: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraRows:
    """The LoRA of a batch's adapters at linear operators of one input, or bottlenecks, in rows.

    An adapter's entries in `rows` are as many for each of its matrices in the model, one after the
    other (`AdapterSlot`). A site's matrices are A of each output, scaled Bᵀ of each, and the bias.

    Attributes:
        memory: flat, of the adapters' dtype.
        rows: first element of each row of each matrix, int64.
        first: number of the site's first matrix, among all.
        ranks: rank of each output and slot, [outputs, slots], int32; 0 where there is none.
        in_size: columns of the input.
        out_starts: first column of each output in the product with those that have no LoRA.
        out_sizes: columns of each output.
        biases: 1 for a slot whose bottleneck has a bias, [1, slots]; of LoRA [0, slots].
        known: tables that kernels make of these, for all steps.
    """

    memory: Tensor
    rows: Tensor
    first: int
    ranks: Tensor
    in_size: int
    out_starts: tuple[int, ...]
    out_sizes: tuple[int, ...]
    biases: Tensor
    tokens: TokenSpans
    known: dict[str, Any]

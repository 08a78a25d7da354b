"""Which tokens of a batch use which adapter, and the weights as emitted programs take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which tokens use which adapter.

    Attributes:
        start: tokens before it use none.
        sizes: tokens of each adapter, in the order of the stacks.
        uniform: the size of each segment where all are equal, else 0.
        gather: [adapters, largest size], token of each place of a padded batch; None where padding
            would more than double the work.
        places: where each token is in the padded batch, [tokens from start].
        batched: (adapters, size, -1) where all tokens are in segments of one size, else None.
    """

    start: int
    sizes: tuple[int, ...]
    uniform: int
    gather: Tensor | None
    places: Tensor | None

    @cached_property
    def batched(self) -> tuple[int, int, int] | None:
        uniform = not self.start and self.uniform and len(self.sizes) > 1
        return (len(self.sizes), self.uniform, -1) if uniform else None


@dataclass(frozen=True)
class SegmentedWeight:
    """One site's weights of the batch's adapters.

    Attributes:
        weight: [adapters, in, out], scaled; of a bias [adapters, 1, out]. A's is a transposed view,
            which the CPU's batched product reads faster.
        segments: which tokens use which.
        present: of each adapter, whether it has a weight here; its part of the stack is zeros else,
            or ones where the program scales by it.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class JoinedLora:
    """The LoRA of the batch's adapters at linear operators of one input.

    Attributes:
        a: [adapters, in, ranks], the ranks of all outputs one behind the other.
        b: for each output, [adapters, rank, out], scaled; empty where joined.
        joined_b: [adapters, ranks, outs], each output's in its own rows and columns; None where
            that would read more zeros than the calls it saves are worth.
        ranks: of each output.
        segments: which tokens use which adapter.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    joined_b: Tensor | None
    ranks: list[int]
    segments: Segments


def segments_of(start: int, sizes: Sequence[int], device: torch.device) -> Segments:
    """Segments of these sizes; tokens before `start` have no adapter, and a size may be 0."""
    largest, total = max(sizes), sum(sizes)
    if all(size == largest for size in sizes):
        return Segments(start, tuple(sizes), largest, None, None)
    if largest * len(sizes) > 2 * total:
        return Segments(start, tuple(sizes), 0, None, None)
    each, tokens = torch.tensor(sizes), torch.arange(total)
    # How far a token's place is behind its index: where its segment begins in the padded batch.
    skipped = largest * torch.arange(len(sizes)) - (each.cumsum(0) - each)
    places = tokens + skipped.repeat_interleave(each)
    gather = torch.zeros(len(sizes), largest, dtype=torch.long)
    gather.view(-1)[places] = tokens
    return Segments(start, tuple(sizes), 0, gather.to(device), places.to(device))

"""Batches, adapters in pages and float64 references for the tests of the segmented kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.batch import NO_SLOT, AdapterSlot
from pcg.kernels.triton.adapters.rank_rows import RankRows, rank_rows
from pcg.kernels.triton.adapters.token_tiles import TileCapacity, TokenTiles, token_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of one rounding, half a unit in the last place."""


@dataclass(frozen=True)
class Case:
    """What a test draws.

    Attributes:
        runs: neighbouring tokens and their slot, -1 for none.
        ranks: of each slot, for each slice.
        sizes: columns of each slice.
        block: places of a tile.
        is_padded: whether there is more capacity than needed.
        seed: of the numbers.
    """

    runs: tuple[tuple[int, int], ...]
    ranks: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    block: int
    is_padded: bool
    seed: int

    @property
    def slots(self) -> list[int]:
        """Of each token."""
        return [slot for count, slot in self.runs for _ in range(count)]

    @property
    def adapters(self) -> list[AdapterSlot]:
        """Of each slot; there is a matrix before those of the site."""
        found, first = [], 0
        for number, ranks in enumerate(zip(*self.ranks, strict=True)):
            width = padded(max(1, *ranks))
            found.append(AdapterSlot(number, first, width))
            first += (1 + len(self.ranks)) * width
        return found

    @property
    def tiles(self) -> TokenTiles:
        starts = [sum(count for count, _ in self.runs[:i]) for i in range(len(self.runs))]
        adapters = [*self.adapters, NO_SLOT]
        runs = zip(starts, self.runs, strict=True)
        spans = [(start, count, adapters[slot]) for start, (count, slot) in runs]
        most = max(slot.width for slot in adapters)
        capacity = (
            TileCapacity.of(len(self.slots), len(self.ranks[0]), self.block, most)
            if self.is_padded
            else None
        )
        return token_tiles(spans, self.block, capacity)

    @property
    def starts(self) -> list[int]:
        return [sum(self.sizes[:j]) for j in range(len(self.sizes))]

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def padded(rank: int) -> int:
    """The sums of a place for so many ranks."""
    return -(-rank // 16) * 16


def cases(most_slices: int = 2, most_rank: int = 64) -> st.SearchStrategy[Case]:
    """Batches of 1 to a few dozen tokens, 3 slots, and ranks of every kind."""
    rank = st.sampled_from([r for r in (1, 8, 16, 4, 17, 64, 40, 32, 0) if r <= most_rank])
    run = st.tuples(st.sampled_from((1, 19, 2, 3, 16)), st.sampled_from((0, 1, 2, -1)))

    def of(slices: int) -> st.SearchStrategy[Case]:
        ranks = st.tuples(*[st.tuples(*[rank] * 3)] * slices)
        sizes = st.tuples(*[st.sampled_from((8, 24, 136))] * slices)
        return st.builds(
            Case,
            st.lists(run, min_size=1, max_size=5).map(tuple),
            ranks,
            sizes,
            st.sampled_from((16, 64)),
            st.booleans(),
            st.integers(0, 1000),
        )

    return st.integers(1, most_slices).flatmap(of)


def scattered(
    ranks: Sequence[Sequence[int]],
    starts: Sequence[int],
    sizes: Sequence[int],
    adapters: Sequence[AdapterSlot],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> RankRows:
    """Rows of random numbers in random order, with NaN between them, and none where none is."""
    count = [
        (j, slot, k) for j, of in enumerate(ranks) for slot, r in enumerate(of) for k in range(r)
    ]
    pages = max(sizes) + 8
    memory = torch.full((pages * (len(count) + 1),), torch.nan, dtype=dtype)
    entries = max(one.first + (1 + len(ranks)) * one.width for one in adapters)
    rows = torch.full((entries,), -(2**40), dtype=torch.int64)
    order = torch.randperm(len(count), generator=generator).tolist()
    for (j, slot, k), page in zip(count, order, strict=True):
        rows[entry(adapters[slot], 1 + j) + k] = page * pages + 8
        numbers = torch.randn(sizes[j], generator=generator)
        memory[page * pages + 8 : page * pages + 8 + sizes[j]] = numbers.to(dtype)
    there = torch.tensor(ranks, dtype=torch.int32)
    return rank_rows(memory, rows, 1, there, starts, sizes)


def entry(adapter: AdapterSlot, matrix: int) -> int:
    """An adapter's first entry of a matrix."""
    return adapter.first + matrix * adapter.width


def drawn(case: Case, x_dtype: torch.dtype, size: int) -> Tensor:
    """Tokens, in a tensor of more columns."""
    return torch.randn(len(case.slots), size + 8, generator=case.generator).to(x_dtype)[:, :size]


def scales_of(case: Case) -> Tensor:
    return torch.rand(len(case.ranks), len(case.ranks[0]), generator=case.generator) * 2 - 1


def firsts_of(rows: RankRows, j: int, adapter: AdapterSlot) -> list[int]:
    """The first element of each row of a matrix."""
    start = entry(adapter, rows.first + j)
    found: list[int] = rows.rows[start : start + int(rows.ranks[j, adapter.number])].tolist()
    return found


def matrix(rows: RankRows, j: int, adapter: AdapterSlot) -> Tensor:
    """The rows of one matrix, [rank, size], in float64."""
    firsts = firsts_of(rows, j, adapter)
    own = [rows.memory[first : first + rows.sizes[j]] for first in firsts]
    return torch.stack(own).double() if own else torch.zeros(0, rows.sizes[j], dtype=torch.float64)


def columns(x: Tensor, rows: RankRows, j: int) -> Tensor:
    """The columns of a slice, [tokens, size], in float64."""
    return x[:, rows.starts[j] : rows.starts[j] + rows.sizes[j]].double()


def check_close(found: Tensor, expected: Tensor, magnitude: Tensor, relative: float) -> None:
    """AssertionError: an error of more than that part of what was added up."""
    error = (found.double() - expected).abs()
    assert (error <= relative * magnitude + 1e-30).all(), (error / magnitude).nan_to_num().max()

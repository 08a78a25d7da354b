"""The rows of adapters' matrices in a single memory: paged, of any rank.

A matrix of rank r is r rows, each of them contiguous: row k of A [r, in], column k of B [out, r]. A
slice is one of several sites that read the same input or write to neighbouring columns of one
output, as q, k and v. A vector is a matrix with a single row. Row k of slice j begins at element

    rows[first row + (first + j) · width + k]

of the memory: an adapter has `width` entries for each matrix, its greatest rank, from `first row`
on, which the step's lists hold for each tile (`token_tiles`). So no adapter's rank is in the tables
of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.devices import uploaded
from pcg.kernels.sizes import ROW_ALIGNMENT


@dataclass(frozen=True)
class RankRows:
    """Matrices of all slices and slots.

    Attributes:
        memory: flat, of the matrices' dtype.
        rows: first element of each row, int64, multiples of 16 bytes; entries beyond a rank are not
            read.
        first: number of the first slice's matrix among the matrices of each adapter.
        ranks: rows of each matrix, [slices, slots], int32; 0 for a slot without the matrix.
        starts: the first column of each slice in the tokens' tensor that it reads or writes.
        sizes: columns of each slice, elements of a row.
        columns: starts and sizes, [slices, 2], int32, for the kernels.
        turned: the rank of a single matrix stored column by column, as [n, r]; 0 of
            rows.
        others: the memories of the slices behind the first, if each has its own.
    """

    memory: Tensor
    rows: Tensor
    first: int
    ranks: Tensor
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    columns: Tensor
    turned: int = 0
    others: tuple[Tensor, ...] = ()

    @property
    def slices(self) -> int:
        return self.ranks.shape[0]

    @property
    def slots(self) -> int:
        return self.ranks.shape[1]

    @property
    def is_shared(self) -> bool:
        return len(set(zip(self.starts, self.sizes, strict=True))) == 1


def rank_rows(
    memory: Tensor,
    rows: Tensor,
    first: int,
    ranks: Tensor,
    starts: Sequence[int],
    sizes: Sequence[int],
) -> RankRows:
    """Describe matrices in a memory; see `RankRows` for the arguments.

    It copies to the device, so call it once a site, outside of a step; `rows` and `ranks` may be
    overwritten in place as adapters change.

    Raises:
        CodegenError: columns that the kernels cannot take, or shapes that do not match.
    """
    if rows.dim() != 1 or {len(starts), len(sizes)} != {len(ranks)}:
        raise CodegenError(
            f"ranks {tuple(ranks.shape)} take rows [n] and {len(ranks)} starts and sizes; there "
            f"are {tuple(rows.shape)}, {len(starts)} and {len(sizes)}"
        )
    for start, size in zip(starts, sizes, strict=True):
        if start % ROW_ALIGNMENT or size % ROW_ALIGNMENT:
            raise CodegenError(
                f"{size} columns from {start} are no multiples of {ROW_ALIGNMENT}; the segmented "
                "kernels load that many at once: use the torch backend"
            )
    columns = int32_on([*zip(starts, sizes, strict=True)], memory.device)
    return RankRows(memory, rows, first, ranks, tuple(starts), tuple(sizes), columns)


def int32_on(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy rows of numbers to a device."""
    return uploaded(torch.tensor(numbers, dtype=torch.int32), device)

"""Adapters in training as the segmented kernels read them: parameters as rows, tokens by job.

Tables are cached, as layers and steps have few kinds of them; each stream has its own, as another
stream does not wait for their copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import AdapterSlot
from pcg.kernels.devices import table_cache, uploaded
from pcg.kernels.sizes import RANK_STEP, ROW_ALIGNMENT
from pcg.kernels.triton.adapters.rank_rows import RankRows, int32_on, rank_rows
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles, tiles_on

MOST_RANK = 256
"""Beyond, products are PyTorch's: a guess of where a library's tiles pay, until it is measured."""

_ENOUGH_TILES = 64
"""Of 36 KiB each under way, two thirds of what hides an H200's latency of memory."""

_MOST_JOINED = 1024
"""Tokens for each job beside the first, up to which to copy them should cost less than its launch:
16 MB of 4096 columns, read and written at 4 TB/s, in 4 us. To be measured."""


def are_few(counts: Sequence[int]) -> bool:
    """Return whether joining these tokens of jobs is faster than a launch for each."""
    return sum(counts) <= _MOST_JOINED * (len(counts) - 1)


def is_column_wise(x: Tensor) -> bool:
    """Return whether rows of x [T, n] can be loaded 16 bytes at a time."""
    if x.dim() != 2 or x.stride(1) != 1 or not x.numel():
        return False
    return not (x.shape[1] % ROW_ALIGNMENT or x.stride(0) % ROW_ALIGNMENT or x.data_ptr() % 16)


def rows_of(matrices: Sequence[Tensor], memory: Tensor | None = None) -> RankRows:
    """Return matrices [r, n], each of a slot, as rows of a memory, which may hold them already."""
    return slices_of([matrices], [memory])


def slices_of(
    groups: Sequence[Sequence[Tensor]], memories: Sequence[Tensor | None] | None = None
) -> RankRows:
    """Do `rows_of` for slices with a memory each; a slot has the same rank in all of them."""
    known = memories or [None] * len(groups)
    every = [_memory_of(*pair) for pair in zip(groups, known, strict=True)]
    ranks = tuple(len(matrix) for matrix in groups[0])
    sizes = tuple(matrices[0].shape[1] for matrices in groups)
    strides, device = tuple(memory.stride(0) for memory in every), every[0].device
    layout = _layout(ranks, sizes, strides, device, _stream(device))
    return replace(layout, memory=every[0], others=tuple(every[1:]))


def _memory_of(matrices: Sequence[Tensor], memory: Tensor | None) -> Tensor:
    if memory is not None:
        assert memory.is_contiguous()
        return memory
    if len(matrices) > 1:
        return torch.cat([*matrices])
    return matrices[0] if is_column_wise(matrices[0]) else matrices[0].contiguous()


def up_rows_of(groups: Sequence[Sequence[Tensor]], tokens: int) -> RankRows:
    """Return B [out, r] of each slot as rows of Bᵀ, of several slices, without a copy if possible.

    Those of several slots are transposed and joined, and so is one of the few `tokens` that a
    kernel takes one at a time.
    """
    firsts = [matrices[0] for matrices in groups]
    lie = all(matrix.is_contiguous() and not matrix.data_ptr() % 16 for matrix in firsts)
    if len(groups[0]) > 1 or tokens <= DECODE_BLOCK or not lie:
        return slices_of([[matrix.t() for matrix in matrices] for matrices in groups])
    return turned_rows(firsts)


def turned_rows(every: Sequence[Tensor]) -> RankRows:
    """Return a matrix [n, r] of each slice, contiguous, as rows of its columns."""
    rank, device = every[0].shape[1], every[0].device
    sizes = tuple(len(matrix) for matrix in every)
    layout = _layout((rank,), sizes, (1,) * len(every), device, _stream(device))
    return replace(layout, memory=every[0], others=tuple(every[1:]), turned=rank)


def segments_of(
    counts: Sequence[int], ranks: Sequence[int], device: torch.device, slices: int = 1
) -> TokenTiles:
    """Return `counts` tokens of each slot, slot by slot, by adapter."""
    starts = accumulate(counts[:-1], initial=0)
    return segments_at(tuple(zip(starts, counts, strict=True)), ranks, device, slices)


def segments_at(
    spans: Sequence[tuple[int, int]], ranks: Sequence[int], device: torch.device, slices: int = 1
) -> TokenTiles:
    """Return the first token and tokens of each slot, with its rank in every slice."""
    return _segments(tuple(spans), tuple(ranks), slices, device, _stream(device))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@table_cache
def _segments(
    spans: tuple[tuple[int, int], ...],
    ranks: tuple[int, ...],
    slices: int,
    device: torch.device,
    stream: int,
) -> TokenTiles:
    pairs = zip(spans, _slots(ranks, slices), strict=True)
    return tiles_on([(*span, slot) for span, slot in pairs], device)


def _slots(ranks: Sequence[int], slices: int = 1) -> Sequence[AdapterSlot]:
    """Return a slot for each rank, with consecutive entries in tables of rows."""
    widths = [padded_rank(rank) for rank in ranks]
    firsts = accumulate((slices * width for width in widths[:-1]), initial=0)
    columns = enumerate(zip(firsts, widths, strict=True))
    return [AdapterSlot(number, first, width) for number, (first, width) in columns]


def padded_rank(rank: int) -> int:
    """Return the sums that shrink makes of a token for a rank."""
    return -(-rank // RANK_STEP) * RANK_STEP


@table_cache
def _layout(
    ranks: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    device: torch.device,
    stream: int,
) -> RankRows:
    """Describe matrices of these ranks in each slice, with rows `strides` apart in a memory."""
    slices = len(sizes)
    rows = torch.zeros(slices * sum(map(padded_rank, ranks)), dtype=torch.int64)
    befores = accumulate(ranks[:-1], initial=0)
    for rank, slot, before in zip(ranks, _slots(ranks, slices), befores, strict=True):
        for j, stride in enumerate(strides):
            first = slot.first + j * slot.width
            rows[first : first + rank] = stride * torch.arange(before, before + rank)
    of_slots, nowhere = int32_on([ranks] * slices, device), torch.empty(0, device=device)
    return rank_rows(nowhere, uploaded(rows, device), 0, of_slots, (0,) * slices, sizes)


def vectors_of(each: Sequence[Tensor]) -> RankRows:
    """Return vectors, each of a slot of the same width, as the row of a memory."""
    sizes = tuple(len(vector) for vector in each)
    memory = torch.cat([*each]) if len(each) > 1 else each[0].contiguous()
    return replace(_places_of(sizes, memory.device, _stream(memory.device)), memory=memory)


@table_cache
def _places_of(sizes: tuple[int, ...], device: torch.device, stream: int) -> RankRows:
    rows = torch.zeros(sum(map(padded_rank, sizes)), dtype=torch.int64)
    for slot, before in zip(_slots(sizes), accumulate(sizes[:-1], initial=0), strict=True):
        rows[slot.first] = before
    ranks = int32_on([[1] * len(sizes)], device)
    nowhere = torch.empty(0, device=device)
    return rank_rows(nowhere, uploaded(rows, device), 0, ranks, (0,), (ROW_ALIGNMENT,))


def scales_of(groups: Sequence[Sequence[Any]], device: torch.device) -> Tensor:
    """Return the scales of adapters' weights, each of a slot, by slice: [slices, slots]."""
    scales = tuple(tuple(weight.scale for weight in weights) for weights in groups)
    return _scales(scales, device, _stream(device))


@table_cache
def _scales(scales: tuple[tuple[float, ...], ...], device: torch.device, stream: int) -> Tensor:
    return uploaded(torch.tensor(scales, dtype=torch.float32), device)


_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def is_tokens(x: Tensor) -> bool:
    """Return whether the kernels can read x as [T, n]."""
    return x.dtype in _HALF_OR_SINGLE and is_column_wise(x)


def is_matrix(matrix: Tensor, columns: int) -> bool:
    """Return whether the kernels can read a matrix as [r, columns]; rank 0 has no rows."""
    is_known = matrix.dim() == 2 and matrix.shape[1] == columns
    return is_known and matrix.dtype == torch.float32 and 0 < len(matrix) <= MOST_RANK


def is_summand(s: Tensor) -> bool:
    """Return whether the kernels can read s as [T, r]."""
    return s.dim() == 2 and s.dtype == torch.float32 and 0 < s.shape[1] <= MOST_RANK


def parts_for(tiles: TokenTiles, slices: int = 1) -> int | None:
    """Return the parts of shrink's sums: 1 if tiles are enough for the device, else its default.

    To add parts up takes a launch, which is as long as parts save from `_ENOUGH_TILES` on.
    """
    return 1 if len(tiles.tiles) * slices >= _ENOUGH_TILES else None


def whole_sum(s: Tensor) -> Tensor:
    """Sum the parts of `shrink`'s s: [1, slices, sums]."""
    return s if len(s) == 1 else s.sum(0, keepdim=True)


def by_slice(s: Tensor) -> Sequence[Tensor]:
    """Split s [1, slices, sums] into slices, [1, 1, sums]."""
    slices: Sequence[Tensor] = s.split(1, 1)
    return slices


def by_job(s: Tensor, counts: Sequence[int], ranks: Sequence[int]) -> Sequence[Tensor]:
    """Split s [1, 1, sums] of consecutive segments into [T, r] of each slot."""
    widths = [padded_rank(rank) for rank in ranks]
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    each = zip(s.view(-1).split(sizes), widths, ranks, strict=True)
    return [part.view(-1, width)[:, :rank] for part, width, rank in each]


def as_sums(each: Sequence[Tensor]) -> Tensor:
    """Return s [T, r] of each slot as the kernels read it, [1, 1, sums]."""
    padded = [_padded(s).view(-1) for s in each]
    return (torch.cat(padded) if len(padded) > 1 else padded[0]).view(1, 1, -1)


def as_slices(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Do `as_sums` for slices, [1, slices, sums]; without a copy of the result of `by_slice`."""
    if len(groups) == 1:
        return as_sums(groups[0])
    firsts = [_padded(each[0]) for each in groups]
    if len(groups[0]) == 1 and _lie_in_line(firsts):
        return firsts[0].as_strided((1, len(firsts), firsts[0].numel()), (0, firsts[0].numel(), 1))
    return torch.cat([as_sums(each) for each in groups], 1)


def _lie_in_line(each: Sequence[Tensor]) -> bool:
    first, size = each[0], each[0].nbytes
    return all(
        tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.data_ptr() == first.data_ptr() + number * size
        for number, tensor in enumerate(each)
    )


def _padded(s: Tensor) -> Tensor:
    missing = padded_rank(s.shape[1]) - s.shape[1]
    return F.pad(s, (0, missing)) if missing else s.contiguous()

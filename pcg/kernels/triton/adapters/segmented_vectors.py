"""Vectors of many adapters in a single launch, each token with its own: (IA)³, DoRA, biases.

    segmented_scale:    y[order[p], c] = (y[order[p], c] - base[c]) · v[j, n] + base[c]
    segmented_bias_add: y[order[p], c] += v[j, n] - base[c]
    segment_inner:      dv[j, n] = scale Σ_p dy[order[p], c] · (y[order[p], c] - base[c])

c = start_j + n is column n of slice j, p a place of `token_tiles`, and v the row that the
place's slot has in `rank_rows`; a slot of rank 0 leaves its tokens unchanged. base is the value
that the adapter does not change, or 0. The gradient by y of segmented_scale is segmented_scale of
dy without a base; that by v is segment_inner of dy and the y that was scaled; that of a bias, only
of dy.

All is computed in fp32, rounded once, and summed in a fixed order.
Grids: (tiles or segments, blocks of columns, slices).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.triton.adapters.device_functions import (
    COUNTS,
    columns_of,
    entries_of,
    item_of,
    rows_at,
    tokens_at,
)
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.segmented_lora import check_gradients, check_tokens
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles

_NUMBERS = [name for name in COUNTS if name in ("first", "slots")]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["tiles"])
def vector_kernel(
    y, stride, order, tiles, memory, rows, ranks, columns, base, first, slots,
    ADDS: tl.constexpr, HAS_BASE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y for a tile and BLOCK_N columns of a slice: v is added if ADDS, else it scales."""
    j = tl.program_id(2)
    _, rank, first_place, count = item_of(tiles, slots, ranks, j)
    start, size = columns_of(columns, j)
    low = tl.program_id(1) * BLOCK_N
    if (count == 0) | (rank == 0) | (low >= size):
        return
    n = low + tl.arange(0, BLOCK_N)
    inside = n < size
    _, entries = entries_of(tiles, rows, first + j)
    row = rows_at(entries, memory)
    v = tl.load(memory + row + n, inside, 0.0).to(tl.float32)
    c = start + n
    m = tl.arange(0, BLOCK_M)
    taken = m < count
    y += tokens_at(order, first_place + m, taken, stride)[:, None] + c[None, :]
    chosen = taken[:, None] & inside[None, :]
    before = tl.load(y, chosen, 0.0)
    of_base = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BASE:
        of_base = tl.load(base + c, inside, 0.0).to(tl.float32)
    if ADDS:
        after = before.to(tl.float32) + (v - of_base)[None, :]
    else:
        after = (before.to(tl.float32) - of_base[None, :]) * v[None, :] + of_base[None, :]
    tl.store(y, after.to(before.dtype), chosen)


def segmented_scale(
    y: Tensor, vectors: RankRows, tiles: TokenTiles, base: Tensor | None = None
) -> Tensor:
    """Return v ⊙ (y - base) + base, each token by its adapter's vector, written over y.

    Args:
        y: [tokens, columns], rows contiguous and aligned as `check_tokens` demands.
        vectors: matrices of rank 1, or 0 for a slot without a vector.
        tiles: the tokens by slot, on the device.
        base: [columns].
    Raises:
        CodegenError: y cannot be loaded 16 bytes at a time, or y or base has too few columns.
    """
    return _change(y, vectors, tiles, base, False)


def segmented_bias_add(
    y: Tensor, vectors: RankRows, tiles: TokenTiles, base: Tensor | None = None
) -> Tensor:
    """Return y + v - base, written over y; the arguments are those of `segmented_scale`."""
    return _change(y, vectors, tiles, base, True)


def _change(
    y: Tensor, vectors: RankRows, tiles: TokenTiles, base: Tensor | None, adds: bool
) -> Tensor:
    check_tokens(y, vectors)
    _check_base(base, vectors)
    is_decode = tiles.block == DECODE_BLOCK
    block_n = 256 if is_decode else 64  # 32 elements a thread
    if tiles.capacity.tiles:
        columns = triton.cdiv(max(vectors.sizes), block_n)
        vector_kernel[(tiles.capacity.tiles, columns, vectors.slices)](
            y, y.stride(0), tiles.order, tiles.tiles, vectors.memory, vectors.rows, vectors.ranks,
            vectors.columns, base, vectors.first, vectors.slots,
            ADDS=adds, HAS_BASE=base is not None,
            BLOCK_M=tiles.block, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["segments"])
def inner_kernel(
    dy, dy_stride, y, y_stride, order, segments, memory, rows, ranks, columns, base, scales,
    first, slots,
    HAS_Y: tl.constexpr, HAS_BASE: tl.constexpr, HAS_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of a segment's dv of a slice.

    Each of BLOCK_T lines adds up every BLOCK_T-th token, and then the lines are added.
    """
    j = tl.program_id(2)
    matrix, rank, first_place, count = item_of(segments, slots, ranks, j)
    start, size = columns_of(columns, j)
    low = tl.program_id(1) * BLOCK_N
    if (count == 0) | (rank == 0) | (low >= size):
        return
    n = low + tl.arange(0, BLOCK_N)
    inside = n < size
    c = start + n
    of_base = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BASE:
        of_base = tl.load(base + c, inside, 0.0).to(tl.float32)
    lines = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for first_token in range(0, count, BLOCK_T):
        t = first_token + tl.arange(0, BLOCK_T)
        taken = t < count
        chosen = taken[:, None] & inside[None, :]
        token = tl.load(order + first_place + t, taken, 0).to(tl.int64)
        of_dy = tl.multiple_of(token * dy_stride, [8])
        left = tl.load(dy + of_dy[:, None] + c[None, :], chosen, 0.0).to(tl.float32)
        if HAS_Y:
            of_y = tl.multiple_of(token * y_stride, [8])
            right = tl.load(y + of_y[:, None] + c[None, :], chosen, 0.0).to(tl.float32)
            left *= right - of_base[None, :]
        lines += left
    total = tl.sum(lines, 0)
    if HAS_SCALES:
        total *= tl.load(scales + matrix)
    _, entries = entries_of(segments, rows, first + j)
    row = rows_at(entries, memory)
    tl.store(memory + row + n, total, inside)


def segment_inner(
    dy: Tensor,
    y: Tensor | None,
    gradients: RankRows,
    tiles: TokenTiles,
    base: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Write scale · Σ dy ⊙ (y - base) over each segment's tokens; without y, scale · Σ dy.

    Slots without tokens in the batch are left as they are. `gradients` holds the vectors'
    gradients, in fp32, and scales are [slices, slots], in fp32.

    Raises:
        CodegenError: dy or y cannot be loaded 16 bytes at a time, or gradients are not fp32.
    """
    for x in (dy,) if y is None else (dy, y):
        check_tokens(x, gradients)
    _check_base(base, gradients)
    check_gradients(gradients)
    grid = (tiles.capacity.segments, triton.cdiv(max(gradients.sizes), _COLUMNS), gradients.slices)
    if tiles.capacity.segments:
        inner_kernel[grid](
            dy, dy.stride(0), y, 0 if y is None else y.stride(0), tiles.order, tiles.segments,
            gradients.memory, gradients.rows, gradients.ranks, gradients.columns, base, scales,
            gradients.first, gradients.slots,
            HAS_Y=y is not None, HAS_BASE=base is not None, HAS_SCALES=scales is not None,
            BLOCK_T=32, BLOCK_N=_COLUMNS, num_warps=4, num_stages=2,
        )  # fmt: skip


_COLUMNS = 64
"""Columns of a program of segment_inner: few, as a segment's tokens are not shared out."""


def _check_base(base: Tensor | None, vectors: RankRows) -> None:
    ends = [start + size for start, size in zip(vectors.starts, vectors.sizes, strict=True)]
    if base is not None and (base.dim() != 1 or len(base) < max(ends) or base.stride(0) != 1):
        raise CodegenError(f"base {tuple(base.shape)} is no [{max(ends)} columns], contiguous")

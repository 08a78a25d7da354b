"""The gradients of segmented LoRA, of many jobs in one launch.

    ds[j, p, k] = scale Σ_n dy[order[p], start_j + n] · B[j, k, n]
    dx[order[p], i] += Σ_j Σ_k ds[j, p, k] · A[j, k, i]
    dA[j, k, i] = Σ_p ds[j, p, k] · x[order[p], start_j + i]
    dB[j, k, n] = Σ_p scale · s[j, p, k] · dy[order[p], start_j + n]

p runs over the places of a slot; see `segmented_lora` for the rest. The first two are its kernels.
The others are one, `segment_outer`, as dB lies by its rows, like B. Gradients are fp32. Each block
of one is owned by one program, which adds up the tokens in their order, so that bits do not depend
on the other jobs of a batch.

Grid: (segments, blocks of columns, slices · blocks of ranks).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.segmented_lora import (
    COUNTS,
    check_partial_sums,
    check_tokens,
    expand_add,
    shrink,
)
from pcg.kernels.triton.adapters.token_tiles import TokenTiles
from pcg.kernels.triton.adapters.wide_product import wide_product


def expand_backward(
    dy: Tensor, b: RankRows, tiles: TokenTiles, scales: Tensor | None = None
) -> Tensor:
    """ds = scale · dy B, in parts, as `shrink` makes s."""
    return shrink(dy, b, tiles, scales)


def shrink_backward(dx: Tensor, ds: Tensor, a: RankRows, tiles: TokenTiles) -> Tensor:
    """dx + ds A, summed over slices, written over dx."""
    return expand_add(dx, ds, a, tiles)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["segments"])
def outer_kernel(
    x, stride, order, segments, s, memory, rows, ranks, columns, scales,
    slices, slots, places, most_rank,
    HAS_SCALES: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows by BLOCK_N columns of a segment's gradient of a slice.

    The product is turned, columns by ranks: see `wide_product` for why s is the second factor.
    """
    segment = segments + 3 * tl.program_id(0)
    j = tl.program_id(2) % slices
    first_rank = tl.program_id(2) // slices * BLOCK_R
    count = tl.load(segment + 2)
    if count == 0:
        return
    matrix = j * slots + tl.load(segment)
    rank = tl.load(ranks + matrix)
    size = tl.multiple_of(tl.load(columns + 2 * j + 1), 8)
    first = tl.program_id(1) * BLOCK_N
    if (first_rank >= rank) | (first >= size):
        return
    first_place = tl.load(segment + 1)
    start = tl.multiple_of(tl.load(columns + 2 * j), 8)
    n = first + tl.arange(0, BLOCK_N)
    k = first_rank + tl.arange(0, BLOCK_R)
    inside = n < size
    s += j * places * most_rank
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for done in range(0, count, BLOCK_T):
        t = done + tl.arange(0, BLOCK_T)
        taken = t < count
        token = tl.load(order + first_place + t, taken, 0)
        token = tl.multiple_of(token.to(tl.int64) * stride, [8])
        at = token[:, None] + (start + n)[None, :]
        own = tl.load(x + at, taken[:, None] & inside[None, :], 0.0)
        of_place = (first_place + t)[:, None] * most_rank + k[None, :]
        of_token = tl.load(s + of_place, taken[:, None], 0.0)
        total = wide_product(tl.trans(own), of_token, total)
    if HAS_SCALES:
        total *= tl.load(scales + matrix)
    row = tl.load(rows + matrix * most_rank + k, k < rank, 0)
    at = memory + tl.multiple_of(row, [4])[None, :] + n[:, None]
    kept = inside[:, None] & (k < rank)[None, :]
    if ADDS:
        total += tl.load(at, kept, 0.0)
    tl.store(at, total, kept)


def segment_outer(
    s: Tensor,
    x: Tensor,
    gradients: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None = None,
    adds: bool = False,
) -> None:
    """Write scale · Σ s ⊗ x over each segment's tokens: dA of ds and x, dB of s and dy.

    Slots without tokens in the batch are left as they are.

    Args:
        s: of `shrink`, or ds.
        x: [tokens, columns], or dy.
        gradients: where the rows of the gradients lie, in fp32, and the ranks.
        tiles: as for s.
        scales: [slices, slots], fp32.
        adds: to what is there, rather than over it.
    Raises:
        CodegenError: x cannot be loaded 16 bytes at once, s is of others, gradients are not fp32.
    """
    check_tokens(x, gradients)
    check_partial_sums(s, gradients, tiles)
    if gradients.memory.dtype != torch.float32:
        raise CodegenError(f"gradients in {gradients.memory.dtype}; they are kept in torch.float32")
    if s.shape[0] > 1:
        s = s.sum(0)  # once, as every block of columns reads it
    is_wide = x.dtype == torch.float32
    block_n = 64  # the rows of one wgmma, and 128 bytes of bf16
    columns = triton.cdiv(max(gradients.sizes), block_n)
    ranks = gradients.most_rank // 16
    if tiles.room.segments:
        outer_kernel[(tiles.room.segments, columns, gradients.slices * ranks)](
            x, x.stride(0), tiles.order, tiles.segments, s, gradients.memory, gradients.rows,
            gradients.ranks, gradients.columns, scales,
            gradients.slices, gradients.slots, tiles.room.places, gradients.most_rank,
            HAS_SCALES=scales is not None, ADDS=adds,
            BLOCK_T=32 if is_wide else 64, BLOCK_N=block_n, BLOCK_R=16,
            num_warps=4, num_stages=3,
        )  # fmt: skip

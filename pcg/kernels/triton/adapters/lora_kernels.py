"""The kernels of LoRA of many adapters in one launch, each token by its own; see `segmented_lora`.

Grids: shrink (tiles, parts, slices · blocks of ranks), expand (tiles, blocks of columns, slices),
outer (segments, blocks of columns, slices · blocks of ranks).

Decode has no form of its own for segments of one token, as a product of matrix and vector: rows of
absent tokens are not loaded, so it would read no byte less, and a token's bits would depend on
whether its adapter has others in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pcg.kernels.triton.adapters.device_functions import (
    COUNTS,
    columns_of,
    rows_at,
    segment_of,
    sum_of_parts,
    tokens_at,
    wide_product,
)


@triton.jit
def shrink_width(
    x, token, place, taken, start, size, memory, row, k, rank, low, high, scale, s, most_rank,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """s for places [M] and ranks k [R], summed over the columns low to high of a slice.

    `token` is the first element of each place's token in x, `row` that of each row in the memory;
    `s` is that of the part, the slice and place 0.
    """
    kept = (k < rank)[:, None]
    total = tl.zeros((token.shape[0], k.shape[0]), tl.float32)
    for first in range(low, high, BLOCK_K):
        i = first + tl.arange(0, BLOCK_K)
        inside = (i < size)[None, :]
        own = tl.load(x + token[:, None] + (start + i)[None, :], taken[:, None] & inside, 0.0)
        a = tl.load(memory + row[:, None] + i[None, :], kept & inside, 0.0)
        if own.dtype == a.dtype:
            total = tl.dot(own, tl.trans(a), total, input_precision="ieee")
        else:
            total = wide_product(own, tl.trans(a), total)
    at = place[:, None] * most_rank + k[None, :]
    tl.store(s + at, total * scale, taken[:, None] & (k < most_rank)[None, :])


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["tiles"])
def shrink_kernel(
    x, stride, order, tiles, memory, rows, ranks, columns, scales, s,
    slices, slots, places, most_rank, part_columns,
    HAS_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One part of s for a tile, a slice and up to BLOCK_R of its ranks."""
    part = tl.program_id(1)
    j = tl.program_id(2) % slices
    first_rank = tl.program_id(2) // slices * BLOCK_R
    matrix, rank, first_place, count = segment_of(tiles, slots, ranks, j)
    if count == 0:
        return
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales + matrix)
    start, size = columns_of(columns, j)
    m = tl.arange(0, BLOCK_M)
    place = first_place + m
    taken = m < count
    token = tokens_at(order, place, taken, stride)
    rows += matrix * most_rank
    k = first_rank + tl.arange(0, 16)
    row = rows_at(rows + k, memory)
    if first_rank >= rank:
        return
    s += (part * slices + j) * places * most_rank
    low = part * part_columns
    high = tl.minimum(low + part_columns, size)
    width = tl.minimum(rank - first_rank, BLOCK_R)
    if width <= 16:
        shrink_width(
            x, token, place, taken, start, size, memory, row, k, rank, low, high, scale, s,
            most_rank, BLOCK_K,
        )  # fmt: skip
    if BLOCK_R >= 32:
        is_middle = (width > 16) & (width <= 32)
        if is_middle:
            middle = first_rank + tl.arange(0, 32)
            of_middle = rows_at(rows + middle, memory, middle < most_rank)
            shrink_width(
                x, token, place, taken, start, size, memory, of_middle, middle, rank, low, high,
                scale, s, most_rank, BLOCK_K,
            )  # fmt: skip
    if BLOCK_R == 64:
        is_widest = width > 32
        if is_widest:
            widest = first_rank + tl.arange(0, 64)
            of_widest = rows_at(rows + widest, memory, widest < most_rank)
            shrink_width(
                x, token, place, taken, start, size, memory, of_widest, widest, rank, low, high,
                scale, s, most_rank, BLOCK_K,
            )  # fmt: skip


@triton.jit
def expand_matrix(
    total, memory, rows, row, rank, n, inside, s, at, part_stride, taken, scale, most_rank,
    PARTS: tl.constexpr,
):  # fmt: skip
    """total + scale · Bᵀ sᵀ of one matrix, [N, M].

    `row` is the first element of the first 16 rows, `at` the element of s of each place's rank 0.
    """
    for first_rank in range(0, rank, 16):
        k = first_rank + tl.arange(0, 16)
        b = tl.load(memory + row[:, None] + n[None, :], (k < rank)[:, None] & inside, 0.0)
        part = sum_of_parts(s, at + k[:, None], part_stride, taken, PARTS)
        # Under way while the product is made.
        row = rows_at(rows + k + 16, memory, k + 16 < most_rank)
        total = wide_product(tl.trans(b), part * scale, total)
    return total


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["tiles"])
def expand_kernel(
    y, stride, z, z_stride, order, tiles, memory, rows, ranks, columns, scales, s,
    slices, slots, places, most_rank,
    HAS_SCALES: tl.constexpr, SUMMED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """z for a tile and BLOCK_N columns of a slice, or of SUMMED slices that have the same ones.

    The product is turned, columns by tokens: see `wide_product` for why s is the second factor.
    """
    j = tl.program_id(2) * SUMMED
    matrix, rank, first_place, count = segment_of(tiles, slots, ranks, j)
    start, size = columns_of(columns, j)
    first = tl.program_id(1) * BLOCK_N
    if (count == 0) | (first >= size):
        return
    row = rows_at(rows + matrix * most_rank + tl.arange(0, 16), memory)
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales + matrix)
    m = tl.arange(0, BLOCK_M)
    place = first_place + m
    taken = (m < count)[None, :]
    token = tl.load(order + place, m < count, 0).to(tl.int64)
    if SUMMED == 1:
        is_absent = rank == 0
        if is_absent:
            return
    n = first + tl.arange(0, BLOCK_N)
    inside = n < size
    y += tl.multiple_of(token * stride, [8])[None, :] + (start + n)[:, None]
    if BLOCK_M == 16:  # under way while the product waits; in prefill it would cost registers
        before = tl.load(y, inside[:, None] & taken, 0.0)
    part_stride = slices * places * most_rank
    at = (j * places + place)[None, :] * most_rank
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total = expand_matrix(
        total, memory, rows + matrix * most_rank, row, rank, n, inside[None, :],
        s, at, part_stride, taken, scale, most_rank, PARTS,
    )  # fmt: skip
    for _ in range(1, SUMMED):
        matrix += slots
        at += places * most_rank
        rank = tl.load(ranks + matrix)
        row = rows_at(rows + matrix * most_rank + tl.arange(0, 16), memory)
        if HAS_SCALES:
            scale = tl.load(scales + matrix)
        total = expand_matrix(
            total, memory, rows + matrix * most_rank, row, rank, n, inside[None, :],
            s, at, part_stride, taken, scale, most_rank, PARTS,
        )  # fmt: skip
    if BLOCK_M != 16:
        before = tl.load(y, inside[:, None] & taken, 0.0)
    z += tl.multiple_of(token * z_stride, [8])[None, :] + (start + n)[:, None]
    tl.store(z, (before.to(tl.float32) + total).to(before.dtype), inside[:, None] & taken)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["segments"])
def outer_kernel(
    x, stride, order, segments, s, memory, rows, ranks, columns, scales,
    slices, slots, places, most_rank,
    HAS_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows by BLOCK_N columns of a segment's gradient of a slice.

    The product is turned, columns by ranks: see `wide_product` for why s is the second factor.
    """
    j = tl.program_id(2) % slices
    first_rank = tl.program_id(2) // slices * BLOCK_R
    matrix, rank, first_place, count = segment_of(segments, slots, ranks, j)
    start, size = columns_of(columns, j)
    first = tl.program_id(1) * BLOCK_N
    if (count == 0) | (first_rank >= rank) | (first >= size):
        return
    n = first + tl.arange(0, BLOCK_N)
    k = first_rank + tl.arange(0, BLOCK_R)
    inside = n < size
    s += j * places * most_rank
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for done in range(0, count, BLOCK_T):
        t = done + tl.arange(0, BLOCK_T)
        taken = t < count
        token = tokens_at(order, first_place + t, taken, stride)
        at = token[:, None] + (start + n)[None, :]
        own = tl.load(x + at, taken[:, None] & inside[None, :], 0.0)
        of_place = (first_place + t)[:, None] * most_rank + k[None, :]
        of_token = tl.load(s + of_place, taken[:, None], 0.0)
        total = wide_product(tl.trans(own), of_token, total)
    if HAS_SCALES:
        total *= tl.load(scales + matrix)
    row = rows_at(rows + matrix * most_rank + k, memory, k < rank)
    at = memory + row[None, :] + n[:, None]
    tl.store(at, total, inside[:, None] & (k < rank)[None, :])

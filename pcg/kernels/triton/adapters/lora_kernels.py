"""The kernels of LoRA of many adapters in a launch, each token by its own; see `segmented_lora`.

In training slices may have separate tensors, at most three of a kind: `x_1`, `memory_2` and so on
are those of the second and the third (`of_slice`).

Grids: shrink (blocks of ranks of tiles, parts, slices), expand (tiles or, in decode, tokens; blocks
of columns; slices), outer (blocks of ranks of segments, blocks of columns, slices).

With TURNED there is a single matrix, of that rank, stored column by column: B
[out, r] of a job, as it is trained.

Decode's expand takes a token a program, for any number of tokens of an adapter: B is read again for
each of them, from the L2 cache, and a token's bits do not depend on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pcg.kernels.triton.adapters.device_functions import (
    COUNTS,
    columns_of,
    entries_of,
    expand_token,
    item_of,
    of_slice,
    rows_at,
    sum_of_parts,
    sums_of,
    token_of,
    tokens_at,
    wide_product,
)


@triton.jit
def shrink_width(
    x, token, m, taken, start, size, memory, row, k, rank, low, high, scale, s, width,
    BLOCK_K: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """s for places m [M] of a tile and ranks k [R], summed over columns low to high of a slice.

    `token` is the first element of each place's token in x, `row` that of each row in the memory;
    `s` is the tile's first sum.
    """
    kept = (k < rank)[:, None]
    total = tl.zeros((token.shape[0], k.shape[0]), tl.float32)
    for first in range(low, high, BLOCK_K):
        i = first + tl.arange(0, BLOCK_K)
        inside = (i < size)[None, :]
        of_x = tl.load(x + token[:, None] + (start + i)[None, :], taken[:, None] & inside, 0.0)
        at_a = i[None, :] * TURNED + k[:, None] if TURNED else row[:, None] + i[None, :]
        a = tl.load(memory + at_a, kept & inside, 0.0)
        if of_x.dtype == a.dtype:
            total = tl.dot(of_x, tl.trans(a), total, input_precision="ieee")
        else:
            total = wide_product(of_x, tl.trans(a), total)
    at = m[:, None] * width + k[None, :]
    tl.store(s + at, total * scale, taken[:, None] & (k < width)[None, :])


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["tiles"])
def shrink_kernel(
    x, stride, order, tiles, memory, rows, ranks, columns, scales, s,
    first, slices, slots, sums, part_columns,
    HAS_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, TURNED: tl.constexpr = 0,
    x_1=None, x_2=None, stride_1=None, stride_2=None, memory_1=None, memory_2=None,
    INPUTS: tl.constexpr = 1, MEMORIES: tl.constexpr = 1,
):  # fmt: skip
    """Compute a part of s for a tile, a slice and up to BLOCK_R of its ranks."""
    part = tl.program_id(1)
    j = tl.program_id(2)
    x = of_slice(j, x, x_1, x_2, INPUTS)
    stride = of_slice(j, stride, stride_1, stride_2, INPUTS)
    memory = of_slice(j, memory, memory_1, memory_2, MEMORIES)
    matrix, rank, first_place, count = item_of(tiles, slots, ranks, j)
    if count == 0:
        return
    width, entries = entries_of(tiles, rows, first + j)
    width = tl.multiple_of(width, 16)
    s, first_rank = sums_of(tiles, s, part * slices + j, sums)
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales + matrix)
    start, size = columns_of(columns, j)
    m = tl.arange(0, BLOCK_M)
    place = first_place + m
    taken = m < count
    token = tokens_at(order, place, taken, stride)
    k = first_rank + tl.arange(0, 16)
    row = rows_at(entries + k, memory)
    if first_rank >= rank:
        return
    low = part * part_columns
    high = tl.minimum(low + part_columns, size)
    block_ranks = tl.minimum(rank - first_rank, BLOCK_R)
    if block_ranks <= 16:
        shrink_width(
            x, token, m, taken, start, size, memory, row, k, rank, low, high, scale, s, width,
            BLOCK_K, TURNED,
        )  # fmt: skip
    if BLOCK_R >= 32:
        is_middle = (block_ranks > 16) & (block_ranks <= 32)
        if is_middle:
            middle = first_rank + tl.arange(0, 32)
            of_middle = rows_at(entries + middle, memory, middle < width)
            shrink_width(
                x, token, m, taken, start, size, memory, of_middle, middle, rank, low, high,
                scale, s, width, BLOCK_K, TURNED,
            )  # fmt: skip
    if BLOCK_R == 64:
        is_widest = block_ranks > 32
        if is_widest:
            widest = first_rank + tl.arange(0, 64)
            of_widest = rows_at(entries + widest, memory, widest < width)
            shrink_width(
                x, token, m, taken, start, size, memory, of_widest, widest, rank, low, high,
                scale, s, width, BLOCK_K, TURNED,
            )  # fmt: skip


@triton.jit
def expand_matrix(
    total, memory, entries, row, rank, n, inside, s, at, part_stride, taken, scale, width,
    PARTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return total + scale · Bᵀ sᵀ of a matrix, [N, M].

    `row` is the first element of the first 16 rows, `at` the place in s of each place's rank 0.
    """
    for first_rank in range(0, rank, 16):
        k = first_rank + tl.arange(0, 16)
        at_b = n[None, :] * TURNED + k[:, None] if TURNED else row[:, None] + n[None, :]
        b = tl.load(memory + at_b, (k < rank)[:, None] & inside, 0.0)
        part = sum_of_parts(s, at + k[:, None], part_stride, taken, PARTS)
        # Under way while the product is made.
        row = rows_at(entries + k + 16, memory, k + 16 < width)
        total = wide_product(tl.trans(b), part * scale, total)
    return total


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["tiles"])
def expand_kernel(
    y, stride, z, z_stride, order, tiles, memory, rows, ranks, columns, scales, s,
    first, slices, slots, sums,
    HAS_SCALES: tl.constexpr, SUMMED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr = 0,
    y_1=None, y_2=None, stride_1=None, stride_2=None, z_1=None, z_2=None,
    memory_1=None, memory_2=None,
    OUTPUTS: tl.constexpr = 1, MEMORIES: tl.constexpr = 1,
):  # fmt: skip
    """Compute z for a tile and BLOCK_N columns of a slice, or of SUMMED slices of the same columns.

    The product is turned, columns by tokens: see `wide_product` for why s is the second factor.
    Rows of slices with separate outputs lie in a row, slice by slice.
    """
    j = tl.program_id(2) * SUMMED
    matrix, rank, first_place, count = item_of(tiles, slots, ranks, j)
    start, size = columns_of(columns, j)
    y = of_slice(j, y, y_1, y_2, OUTPUTS)
    stride = of_slice(j, stride, stride_1, stride_2, OUTPUTS)
    z = of_slice(j, z, z_1, z_2, OUTPUTS)
    if OUTPUTS > 1:
        z_stride = size
    of_first = of_slice(j, memory, memory_1, memory_2, MEMORIES)
    low = tl.program_id(1) * BLOCK_N
    if (count == 0) | (low >= size):
        return
    width, entries = entries_of(tiles, rows, first + j)
    width = tl.multiple_of(width, 16)
    row = rows_at(entries + tl.arange(0, 16), memory)
    # A 1 that the compiler does not know: with one that it leaves out, a thread takes up to 60
    # registers more on Ampere, and spills under Triton 3.6.
    scale = tl.where(count > 0, 1.0, 0.0)
    if HAS_SCALES:
        scale = tl.load(scales + matrix)
    m = tl.arange(0, BLOCK_M)
    taken = (m < count)[None, :]
    token = tl.load(order + first_place + m, m < count, 0).to(tl.int64)
    if SUMMED == 1:
        is_absent = rank == 0
        if is_absent:
            return
    n = low + tl.arange(0, BLOCK_N)
    inside = n < size
    of_tile, _ = sums_of(tiles, s, j, sums)
    part_stride = tl.multiple_of(slices * sums, 16)
    at = (m * width)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total = expand_matrix(
        total, of_first, entries, row, rank, n, inside[None, :],
        of_tile, at, part_stride, taken, scale, width, PARTS, TURNED,
    )  # fmt: skip
    for summed in range(1, SUMMED):
        matrix += slots
        of_tile, _ = sums_of(tiles, s, j + summed, sums)
        entries += width
        rank = tl.load(ranks + matrix)
        row = rows_at(entries + tl.arange(0, 16), memory)
        if HAS_SCALES:
            scale = tl.load(scales + matrix)
        of_summed = of_slice(j + summed, memory, memory_1, memory_2, MEMORIES)
        total = expand_matrix(
            total, of_summed, entries, row, rank, n, inside[None, :],
            of_tile, at, part_stride, taken, scale, width, PARTS, TURNED,
        )  # fmt: skip
    y += tl.multiple_of(token * stride, [8])[None, :] + (start + n)[:, None]
    before = tl.load(y, inside[:, None] & taken, 0.0)
    z += tl.multiple_of(token * z_stride, [8])[None, :] + (start + n)[:, None]
    tl.store(z, (before.to(tl.float32) + total).to(before.dtype), inside[:, None] & taken)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["by_token"])
def expand_tokens_kernel(
    y, stride, z, z_stride, by_token, memory, rows, ranks, columns, scales, s,
    first, slices, slots, sums,
    HAS_SCALES: tl.constexpr, SUMMED: tl.constexpr,
    PARTS: tl.constexpr, PART_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute z for a token and BLOCK_N columns of a slice, or of SUMMED slices."""
    token = tl.program_id(0)
    j = tl.program_id(2) * SUMMED
    by_token += 4 * token
    at, rank, entries, first_sum = token_of(by_token, rows, slots, ranks, first + j, j)
    start, size = columns_of(columns, j)
    low = tl.program_id(1) * BLOCK_N
    if (tl.load(by_token) < 0) | (low >= size):
        return
    if SUMMED == 1:
        is_absent = rank == 0
        if is_absent:
            return
    n = low + tl.arange(0, BLOCK_N)
    inside = n < size
    place = token.to(tl.int64)
    before = tl.load(y + tl.multiple_of(place * stride, 8) + start + n, inside, 0.0)
    s += j * sums + first_sum
    total = tl.zeros((BLOCK_N,), tl.float32)
    for summed in tl.static_range(SUMMED):
        if summed > 0:
            at, rank, entries, _ = token_of(
                by_token, rows, slots, ranks, first + j + summed, j + summed
            )
        scale = 1.0
        if HAS_SCALES:
            scale = tl.load(scales + at)
        total = expand_token(
            total, memory, entries, rank, n, inside, s + summed * sums, slices * sums, scale,
            PARTS, PART_BLOCK, STAGES,
        )  # fmt: skip
    z += tl.multiple_of(place * z_stride, 8) + start + n
    tl.store(z, (before.to(tl.float32) + total).to(before.dtype), inside)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["segments"])
def outer_kernel(
    x, stride, order, segments, s, memory, rows, ranks, columns, scales,
    first, slots, sums,
    HAS_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TURNED: tl.constexpr = 0,
    x_1=None, x_2=None, stride_1=None, stride_2=None, memory_1=None, memory_2=None,
    INPUTS: tl.constexpr = 1, MEMORIES: tl.constexpr = 1,
):  # fmt: skip
    """Compute BLOCK_R rows by BLOCK_N columns of a segment's gradient of a slice.

    The product is turned, columns by ranks: see `wide_product` for why s is the second factor.
    """
    j = tl.program_id(2)
    x = of_slice(j, x, x_1, x_2, INPUTS)
    stride = of_slice(j, stride, stride_1, stride_2, INPUTS)
    memory = of_slice(j, memory, memory_1, memory_2, MEMORIES)
    matrix, rank, first_place, count = item_of(segments, slots, ranks, j)
    s, first_rank = sums_of(segments, s, j, sums)
    start, size = columns_of(columns, j)
    low = tl.program_id(1) * BLOCK_N
    if (count == 0) | (first_rank >= rank) | (low >= size):
        return
    width, entries = entries_of(segments, rows, first + j)
    width = tl.multiple_of(width, 16)
    n = low + tl.arange(0, BLOCK_N)
    k = first_rank + tl.arange(0, BLOCK_R)
    inside = n < size
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for first_token in range(0, count, BLOCK_T):
        t = first_token + tl.arange(0, BLOCK_T)
        taken = t < count
        token = tokens_at(order, first_place + t, taken, stride)
        at = token[:, None] + (start + n)[None, :]
        of_x = tl.load(x + at, taken[:, None] & inside[None, :], 0.0)
        of_place = t[:, None] * width + k[None, :]
        of_token = tl.load(s + of_place, taken[:, None], 0.0)
        total = wide_product(tl.trans(of_x), of_token, total)
    if HAS_SCALES:
        total *= tl.load(scales + matrix)
    if TURNED:
        at = memory + n[:, None] * TURNED + k[None, :]
    else:
        row = rows_at(entries + k, memory, k < rank)
        at = memory + row[None, :] + n[:, None]
    tl.store(at, total, inside[:, None] & (k < rank)[None, :])

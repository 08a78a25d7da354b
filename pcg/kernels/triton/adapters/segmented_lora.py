"""LoRA of many adapters in a launch, each token by its own (SGMV, MBGMM, MBGMV), and gradients.

    shrink:        s[j, p, k] = scale Σ_i x[order[p], start_j + i] · A[j, k, i]
    expand_add:    z[order[p], start_j + n] = y[order[p], …] + scale Σ_k s[j, p, k] · B[j, k, n]
    segment_outer: dA[j, k, i] = scale Σ_p s[j, p, k] · x[order[p], start_j + i]

j is a slice, p a place of `token_tiles`, k a rank, A and B are the rows of the place's slot
(`rank_rows`), and scale is the slot's, or 1. Backward is the same kernels with the other matrix:
ds is shrink over B's rows with scale, dx is expand_add over A's without; and dA is segment_outer of
ds and x, dB that of s and dy with scale, as dB lies by its rows, like B.

    x, y, z: [tokens, columns], fp32, bf16 or fp16, of their own dtypes
    s:       [parts, slices, sums], fp32: partial sums, which add up to s over parts; a place has as
             many as its adapter is wide

Sums are in fp32 and in a fixed order, and y is rounded once. Products run on tensor cores where one
factor has 16 bits: x is converted to the dtype of rows of 16 bits, and where the other factor, s or
a row, is fp32, it keeps 16 bits at least (`wide_product`); decode's expand takes none. A rank costs
what it needs, in steps of 16, whatever the others' are: programs, sums and entries of tables are an
adapter's own. s is zero from a rank to the next multiple of 16, and undefined beyond; widths are
multiples of 16, so that s is loaded 16 bytes at a time.

A token's bits depend on its own x and adapter, on the sizes of the tensors, on the tiles' block and
the number of parts, and on nothing else in the batch: each row of a product adds up by itself. In
decode the parts depend on the slice's columns alone; in prefill, on the number of tiles too. Each
block of a gradient is one program's, which adds up the tokens in their order.

In training slices may have separate tensors, at most three of a kind: `x_1`, `memory_2` and so on
are those of the second and the third (`of_slice`). With TURNED there is a single matrix, of that
rank, stored column by column: B [out, r] of a job, as it is trained.

Grids: shrink (blocks of ranks of tiles, parts, slices), expand (tiles or, in decode, tokens; blocks
of columns; slices), outer (blocks of ranks of segments, blocks of columns, slices). Decode's expand
takes a token a program, for any number of tokens of an adapter: B is read again for each of them,
from the L2 cache, and a token's bits do not depend on the others.

Sources: Punica (Chen et al. 2023) §4, S-LoRA (Sheng et al. 2023) §5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.sizes import RANK_STEP, ROW_ALIGNMENT
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
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles, rank_block


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


# The sizes below follow from bytes and programs under way; benchmarks/gpu_kernels.py times them.
DECODE_COLUMNS = 256
"""Columns that a decode program of shrink takes at once: 8 KiB of an adapter of rank 16 in bf16, so
that 64 adapters of 4096 columns are 1024 programs, 8 for each SM of an H200: their loads are all
under way together, which is what hides the memory's latency."""

DECODE_EXPANDED = 512
"""Columns of a decode program of expand: 16 KiB of an adapter of rank 16 in bf16, 16 loads of 16
bytes for each thread of two warps, all under way at once."""

WIDE_STAGES = 4
"""Steps of 16 ranks of a wide adapter that decode's expand has under way: 64 KiB of its rows."""

DECODE_PARTS = 16
"""Parts of a sum in decode, at most: expand reads them all for each block of columns."""

PREFILL_COLUMNS = 64
"""Columns of a step of prefill's shrink: 128 bytes of bf16, the widest row of a swizzled tile."""

PREFILL_PARTS = 8
"""Parts of a sum in prefill, at most."""

PREFILL_PROGRAMS = 256
"""Programs that prefill's shrink is cut into parts for: two for each SM of an H200 (132)."""

OUTER_COLUMNS = 64
"""Columns of a program of the outer product: the rows of one wgmma, and 128 bytes of bf16."""


def shrink(
    x: Tensor,
    a: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None = None,
    parts: int | None = None,
    others: Sequence[Tensor] = (),
) -> Tensor:
    """Return s = scale · x Aᵀ of each token's adapter, summed up in parts.

    Args:
        x: [tokens, columns], rows contiguous and aligned as `check_tokens` demands.
        a: rows of A; of B for ds, with x the output's gradient.
        tiles: the tokens by slot, on the device.
        scales: factors on s, [slices, slots], fp32.
        parts: the number of parts of each sum; by default as many as fill the device.
        others: the tokens of the slices behind the first, if each has its own.
    Returns:
        s [parts, slices, sums], fp32.
    Raises:
        CodegenError: x cannot be loaded 16 bytes at a time, or has too few columns.
    """
    every = [x, *others]
    check_slices(every, a)
    is_decode, is_wide = tiles.block == DECODE_BLOCK, a.memory.dtype == torch.float32
    if not is_wide:
        # Not in the kernel, where tensor cores would read what is converted from registers.
        every = [tokens.to(a.memory.dtype) for tokens in every]
        check_slices(every, a)
    block_r = min(rank_block(tiles.block), triton.next_power_of_2(tiles.width))
    is_large = is_wide and block_r > 16  # tiles of fp32 rows
    # Of fp32 rows fewer at once: they take twice the registers, and more beside 16-bit tokens.
    if is_decode:
        block_k = DECODE_COLUMNS // (2 if is_wide else 1)
    else:
        block_k = PREFILL_COLUMNS // (2 if is_large else 1)
    items = len(tiles.tiles)
    steps = triton.cdiv(max(a.sizes), block_k)
    if parts is None:
        programs = max(1, items * a.slices)
        wanted = triton.next_power_of_2(triton.cdiv(PREFILL_PROGRAMS, programs))
        parts = DECODE_PARTS if is_decode else min(PREFILL_PARTS, wanted)
    part_steps = triton.cdiv(steps, min(parts, steps))
    parts = triton.cdiv(steps, part_steps)
    shape = (parts, a.slices, tiles.capacity.sums)
    s = torch.empty(shape, dtype=torch.float32, device=x.device)
    check_partial_sums(s, a, tiles)
    if items:
        x = every[0]
        shrink_kernel[(items, parts, a.slices)](
            x, x.stride(0), tiles.order, tiles.tiles, a.memory, a.rows, a.ranks, a.columns,
            scales, s, a.first, a.slices, a.slots, tiles.capacity.sums, part_steps * block_k,
            HAS_SCALES=scales is not None,
            BLOCK_M=tiles.block, BLOCK_R=block_r, BLOCK_K=block_k, TURNED=a.turned,
            **_own("x", every), **_memories(a), INPUTS=len(every),
            num_warps=8 if is_large else 4, num_stages=2 if is_decode else 3,
        )  # fmt: skip
    return s


def expand_add(
    y: Tensor,
    s: Tensor,
    b: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None = None,
    in_place: bool = True,
) -> Tensor:
    """Return y + scale · s Bᵀ of each token's adapter.

    Args:
        y: [tokens, columns], rows contiguous and aligned as `check_tokens` demands.
        s: the partial sums of `shrink`, with the same tiles.
        b: rows of B; of A for dx. Slices have separate columns, or all the same, and y is the sum.
        tiles: the tokens by slot.
        scales: factors on s, [slices, slots], fp32.
        in_place: write over y; else return a new tensor, undefined for tokens of no adapter.
    Raises:
        CodegenError: y cannot be loaded 16 bytes at a time, has too few columns, or s does not
            match.
    """
    check_tokens(y, b)
    check_partial_sums(s, b, tiles)
    is_decode, is_wide = tiles.block == DECODE_BLOCK, b.memory.dtype == torch.float32
    summed = b.slices if b.is_shared else 1
    z = y if in_place else torch.empty(y.shape, dtype=y.dtype, device=y.device)
    parts = s.shape[0]
    if is_decode and tiles.capacity.tiles:
        block_n = DECODE_EXPANDED // (2 if is_wide else 1)
        columns = triton.cdiv(max(b.sizes), block_n)
        expand_tokens_kernel[(tiles.capacity.tokens, columns, b.slices // summed)](
            y, y.stride(0), z, z.stride(0), tiles.by_token, b.memory, b.rows, b.ranks,
            b.columns, scales, s, b.first, b.slices, b.slots, tiles.capacity.sums,
            HAS_SCALES=scales is not None, SUMMED=summed,
            PARTS=parts, PART_BLOCK=triton.next_power_of_2(parts), BLOCK_N=block_n,
            STAGES=1 if tiles.width == RANK_STEP else WIDE_STAGES, num_warps=2,
        )  # fmt: skip
    elif tiles.capacity.tiles:
        _expand([y], [z], s, b, tiles, scales, summed)
    return z


def expand_add_each(
    every: Sequence[Tensor], s: Tensor, b: RankRows, tiles: TokenTiles, scales: Tensor | None = None
) -> Sequence[Tensor]:
    """Do `expand_add` with a y for each slice to new tensors; not for tiles of decode."""
    check_slices(every, b)
    check_partial_sums(s, b, tiles)
    outputs = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in every]
    if tiles.capacity.tiles:
        _expand(every, outputs, s, b, tiles, scales, 1)
    return outputs


def _expand(
    every: Sequence[Tensor],
    outputs: Sequence[Tensor],
    s: Tensor,
    b: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None,
    summed: int,
) -> None:
    is_wide, y, z = b.memory.dtype == torch.float32, every[0], outputs[0]
    # y of 128 by 64 is 64 registers a thread; fp32 factors take registers too.
    block_n = 128 // (2 if is_wide else 1)
    columns = triton.cdiv(max(b.sizes), block_n)
    expand_kernel[(tiles.capacity.tiles, columns, b.slices // summed)](
        y, y.stride(0), z, z.stride(0), tiles.order, tiles.tiles, b.memory, b.rows, b.ranks,
        b.columns, scales, s, b.first, b.slices, b.slots, tiles.capacity.sums,
        HAS_SCALES=scales is not None, SUMMED=summed, PARTS=s.shape[0],
        BLOCK_M=tiles.block, BLOCK_N=block_n, TURNED=b.turned,
        **_own("y", every), **_memories(b), OUTPUTS=len(every),
        **{f"z_{number}": output for number, output in enumerate(outputs) if number},
        num_warps=8 if is_wide else 4, num_stages=2,
    )  # fmt: skip


def _own(name: str, every: Sequence[Tensor]) -> dict[str, Any]:
    """Return a kernel's arguments for the tokens of the slices behind the first."""
    arguments: dict[str, Any] = {}
    for number, tensor in enumerate(every[1:], 1):
        arguments |= {f"{name}_{number}": tensor, f"stride_{number}": tensor.stride(0)}
    return arguments


def _memories(rows: RankRows) -> dict[str, Any]:
    """Return a kernel's arguments for the memories of the slices behind the first."""
    arguments = {f"memory_{number}": memory for number, memory in enumerate(rows.others, 1)}
    return {**arguments, "MEMORIES": 1 + len(rows.others)}


def segment_outer(
    s: Tensor,
    x: Tensor,
    gradients: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None = None,
    others: Sequence[Tensor] = (),
) -> None:
    """Write scale · Σ s ⊗ x over each segment's tokens: dA of ds and x, dB of s and dy.

    Slots without tokens in the batch are left as they are. `gradients` holds the rows of the
    gradients, in fp32; the other arguments are those of `shrink`.

    Raises:
        CodegenError: x cannot be loaded 16 bytes at a time, s does not match, gradients are not
            fp32.
    """
    every = [x, *others]
    check_slices(every, gradients)
    check_partial_sums(s, gradients, tiles)
    check_gradients(gradients)
    if s.shape[0] > 1:
        s = s.sum(0)  # once, as every block of columns reads it
    columns = triton.cdiv(max(gradients.sizes), OUTER_COLUMNS)
    items = len(tiles.segments)
    if items:
        outer_kernel[(items, columns, gradients.slices)](
            x, x.stride(0), tiles.order, tiles.segments, s, gradients.memory, gradients.rows,
            gradients.ranks, gradients.columns, scales,
            gradients.first, gradients.slots, tiles.capacity.sums,
            HAS_SCALES=scales is not None, BLOCK_T=32 if x.dtype == torch.float32 else 64,
            BLOCK_N=OUTER_COLUMNS, BLOCK_R=16, TURNED=gradients.turned,
            **_own("x", every), **_memories(gradients), INPUTS=len(every),
            num_warps=4, num_stages=3,
        )  # fmt: skip


def check_slices(every: Sequence[Tensor], rows: RankRows) -> None:
    """Raise a CodegenError unless all slices share an x or have one each, of the same dtype."""
    if len(every) == 1:
        check_tokens(every[0], rows)
        return
    for x, start, size in zip(every, rows.starts, rows.sizes, strict=False):
        check_tokens(x, replace(rows, starts=(start,), sizes=(size,)))
    if len({x.dtype for x in every}) > 1 or len(every) != rows.slices:
        dtypes = ", ".join(str(x.dtype) for x in every)
        raise CodegenError(f"tokens of {dtypes} for {rows.slices} slices")


def check_tokens(x: Tensor, rows: RankRows) -> None:
    """Raise a CodegenError unless x is [tokens, columns] that kernels can load."""
    ends = [start + size for start, size in zip(rows.starts, rows.sizes, strict=True)]
    if x.dim() != 2 or x.shape[1] < max(ends):
        raise CodegenError(f"{tuple(x.shape)} is no [tokens, {max(ends)} columns or more]")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CodegenError(
            f"x in {x.dtype}; the segmented kernels take torch.float32, torch.bfloat16 and "
            "torch.float16: use the torch backend"
        )
    if x.stride(1) != 1 or x.stride(0) % ROW_ALIGNMENT or x.data_ptr() % 16:
        raise CodegenError(
            f"strides {x.stride()} and address {x.data_ptr():#x} of x: rows must be contiguous, "
            f"a multiple of {ROW_ALIGNMENT} elements apart and begin at multiples of 16 bytes"
        )


def check_gradients(gradients: RankRows) -> None:
    """Raise a CodegenError unless gradients are in fp32."""
    if gradients.memory.dtype != torch.float32:
        raise CodegenError(f"gradients in {gradients.memory.dtype}; they are kept in torch.float32")


def check_partial_sums(s: Tensor, rows: RankRows, tiles: TokenTiles) -> None:
    """Raise a CodegenError unless s is of these matrices and places, as kernels index it."""
    expected = (rows.slices, tiles.capacity.sums)
    if s.shape[1:] != expected or s.dtype != torch.float32 or not s.is_contiguous():
        raise CodegenError(
            f"s {tuple(s.shape)} in {s.dtype} is not [parts, slices, sums] of {expected} in "
            "torch.float32, contiguous; make it by shrink with the same tiles"
        )
    if s.shape[2] % RANK_STEP or tiles.width % RANK_STEP or s.numel() >= 2**31:
        raise CodegenError(
            f"s {tuple(s.shape)} of adapters {tiles.width} wide: widths are multiples of "
            f"{RANK_STEP}, and there are fewer than 2**31 elements, which kernels index by 32 bits"
        )

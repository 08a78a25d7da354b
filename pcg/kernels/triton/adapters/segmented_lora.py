"""LoRA of many adapters in one launch, each token by its own (SGMV, MBGMM, MBGMV).

    shrink:     s[j, p, k] = scale Σ_i x[order[p], start_j + i] · A[j, k, i]
    expand_add: z[order[p], start_j + n] = y[order[p], …] + scale Σ_k s[j, p, k] · B[j, k, n]

j is a slice, p a place of `token_tiles`, k a rank, A and B are the rows of the place's slot
(`rank_rows`), and scale is the slot's, or 1. Backward is the same kernels with the other matrix:
ds is shrink over B's rows with scale, dx is expand_add over A's without.

    x, y, z: [tokens, columns], fp32, bf16 or fp16, of their own dtypes
    s:       [parts, slices, places, most_rank], fp32: partial sums, whose sum over parts is s

Sums are in fp32 and in a fixed order, and y is rounded once. Products run on tensor cores where one
factor has 16 bits: x is converted to the dtype of rows of 16 bits, and where the other factor, s or
a row, is fp32, it keeps 16 bits at least (`wide_product`). A rank costs what it needs, in steps of
16, whatever the others' are: programs beyond it leave at once, and rows beyond it are not loaded. s
is zero from a rank to the next multiple of 16, and undefined beyond; most_rank is a multiple of 16,
so that s is loaded 16 bytes at once.

Grids: shrink (tiles, parts, slices · blocks of ranks), expand (tiles, blocks of columns, slices).
A token's bits depend on its own x and adapter, on the sizes of the tensors, on the tiles' block and
the number of parts, and on nothing else in the batch: each row of a product adds up by itself. In
decode the parts depend on the slice's columns alone; in prefill, on the number of tiles too.

Decode has no form of its own for segments of one token, as a product of matrix and vector: rows of
absent tokens are not loaded, so it would read no byte less, and a token's bits would depend on
whether its adapter has others in the batch.

Long by a few lines, as both kernels read one set of tables and share what checks them.

Sources: Punica (Chen et al. 2023) §4, S-LoRA (Sheng et al. 2023) §5.3.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.sizes import ROW_ALIGNMENT
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles
from pcg.kernels.triton.adapters.wide_product import sum_of_parts, wide_product

DECODE_COLUMNS = 256
"""Columns that a decode program of shrink takes at once: 8 KiB of an adapter of rank 16 in bf16, so
that 64 adapters of 4096 columns are 1024 programs, 8 for each SM of an H200: their loads are all
under way together, which is what hides the memory's latency."""

DECODE_PARTS = 16
"""Parts of a sum in decode, at most: expand reads them all for each block of columns."""

PREFILL_COLUMNS = 64
"""Columns of a step of prefill's shrink: 128 bytes of bf16, the widest row of a swizzled tile."""

PREFILL_PARTS = 8
"""Parts of a sum in prefill, at most."""

PREFILL_PROGRAMS = 256
"""Programs that prefill's shrink is cut into parts for: two for each SM of an H200 (132)."""

COUNTS = ["slices", "slots", "places"]
"""Arguments of any value: kernels are not compiled anew for those that 16 divides, or for 1."""


# ------------------------------------------------------------------------------------- shrink


@triton.jit
def shrink_width(
    x, token, place, taken, start, size, memory, row, k, rank, low, high, scale, s, most_rank,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """s for some places and ranks, summed over the columns low to high.

    Args:
        x: first token.
        token: first element in x of each place's, [M].
        place: [M].
        taken: whether there is one, [M].
        start: of the slice, in x.
        size: of the slice.
        memory: of the rows.
        row: first element of each row, [R].
        k: rank of each row, [R].
        rank: of the matrix.
        low: first column.
        high: end of the columns.
        scale: of s.
        s: of the part, slice and place 0.
        most_rank: elements of s from a place to the next.
        BLOCK_K: columns of a step.
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
    tile = tiles + 3 * tl.program_id(0)
    part = tl.program_id(1)
    j = tl.program_id(2) % slices
    first_rank = tl.program_id(2) // slices * BLOCK_R
    slot = tl.load(tile)
    first_place = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return
    matrix = j * slots + slot
    rank = tl.load(ranks + matrix)
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales + matrix)
    start = tl.multiple_of(tl.load(columns + 2 * j), 8)
    size = tl.multiple_of(tl.load(columns + 2 * j + 1), 8)
    m = tl.arange(0, BLOCK_M)
    place = first_place + m
    taken = m < count
    token = tl.load(order + place, taken, 0).to(tl.int64) * stride
    token = tl.multiple_of(token, [8])
    rows += matrix * most_rank
    k = first_rank + tl.arange(0, 16)
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    row = tl.multiple_of(tl.load(rows + k), [of_16_bytes])
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
            of_middle = tl.load(rows + middle, middle < most_rank, 0)
            of_middle = tl.multiple_of(of_middle, [of_16_bytes])
            shrink_width(
                x, token, place, taken, start, size, memory, of_middle, middle, rank, low, high,
                scale, s, most_rank, BLOCK_K,
            )  # fmt: skip
    if BLOCK_R == 64:
        is_widest = width > 32
        if is_widest:
            widest = first_rank + tl.arange(0, 64)
            of_widest = tl.load(rows + widest, widest < most_rank, 0)
            of_widest = tl.multiple_of(of_widest, [of_16_bytes])
            shrink_width(
                x, token, place, taken, start, size, memory, of_widest, widest, rank, low, high,
                scale, s, most_rank, BLOCK_K,
            )  # fmt: skip


def shrink(
    x: Tensor,
    a: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None = None,
    parts: int | None = None,
) -> Tensor:
    """s = scale · x Aᵀ of each token's own adapter, summed up in parts.

    Args:
        x: [tokens, columns], rows contiguous and aligned as `check_tokens` says.
        a: rows of A; of B for ds, with x the output's gradient.
        tiles: the tokens by slot, on the device.
        scales: of s, [slices, slots], fp32.
        parts: to cut each sum into; by default what fills the device.
    Returns:
        s [parts, slices, places, most_rank], fp32.
    Raises:
        CodegenError: x cannot be loaded 16 bytes at once, or has too few columns.
    """
    check_tokens(x, a)
    is_decode, is_wide = tiles.block == DECODE_BLOCK, a.memory.dtype == torch.float32
    if not is_wide:
        # Not in the kernel, where tensor cores would read what is converted from registers.
        x = x.to(a.memory.dtype)
        check_tokens(x, a)
    block_r = 16 if is_decode else min(64, max(16, triton.next_power_of_2(a.most_rank)))
    is_large = is_wide and block_r > 16  # tiles of fp32 rows
    # Of fp32 rows fewer at once: they take twice the registers, and more beside 16-bit tokens.
    if is_decode:
        block_k = DECODE_COLUMNS // (2 if is_wide else 1)
    else:
        block_k = PREFILL_COLUMNS // (2 if is_large else 1)
    rank_blocks = triton.cdiv(a.most_rank, block_r)
    steps = triton.cdiv(max(a.sizes), block_k)
    if parts is None:
        programs = max(1, tiles.room.tiles * a.slices * rank_blocks)
        wanted = triton.next_power_of_2(triton.cdiv(PREFILL_PROGRAMS, programs))
        parts = DECODE_PARTS if is_decode else min(PREFILL_PARTS, wanted)
    part_steps = triton.cdiv(steps, min(parts, steps))
    parts = triton.cdiv(steps, part_steps)
    shape = (parts, a.slices, tiles.room.places, a.most_rank)
    s = torch.empty(shape, dtype=torch.float32, device=x.device)
    check_partial_sums(s, a, tiles)
    if tiles.room.tiles:
        shrink_kernel[(tiles.room.tiles, parts, a.slices * rank_blocks)](
            x, x.stride(0), tiles.order, tiles.tiles, a.memory, a.rows, a.ranks, a.columns,
            scales, s, a.slices, a.slots, tiles.room.places, a.most_rank, part_steps * block_k,
            HAS_SCALES=scales is not None,
            BLOCK_M=tiles.block, BLOCK_R=block_r, BLOCK_K=block_k,
            num_warps=8 if is_large else 4, num_stages=2 if is_decode else 3,
        )  # fmt: skip
    return s


# ------------------------------------------------------------------------------------- expand


@triton.jit
def expand_matrix(
    total, memory, rows, row, rank, n, inside, s, at, part_stride, taken, scale, most_rank,
    PARTS: tl.constexpr,
):  # fmt: skip
    """total + scale · Bᵀ sᵀ of one matrix, [N, M].

    Args:
        total: [N, M].
        memory: of the rows.
        rows: first element of the matrix's row 0.
        row: first element of the first 16 rows, [16].
        rank: of the matrix.
        n: columns, [N].
        inside: which there are, [1, N].
        s: of part 0.
        at: element of s of each place's rank 0, [1, M].
        part_stride: elements from a part to the next.
        taken: which places there are, [1, M].
        scale: of s.
        most_rank: rows that the table takes.
        PARTS: of s.
    """
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    for first_rank in range(0, rank, 16):
        k = first_rank + tl.arange(0, 16)
        b = tl.load(memory + row[:, None] + n[None, :], (k < rank)[:, None] & inside, 0.0)
        part = sum_of_parts(s, at + k[:, None], part_stride, taken, PARTS)
        # Under way while the product is made.
        row = tl.multiple_of(tl.load(rows + k + 16, k + 16 < most_rank, 0), [of_16_bytes])
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
    tile = tiles + 3 * tl.program_id(0)
    j = tl.program_id(2) * SUMMED
    slot = tl.load(tile)
    first_place = tl.load(tile + 1)
    count = tl.load(tile + 2)
    size = tl.multiple_of(tl.load(columns + 2 * j + 1), 8)
    first = tl.program_id(1) * BLOCK_N
    if (count == 0) | (first >= size):
        return
    matrix = j * slots + slot
    rank = tl.load(ranks + matrix)
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    row = tl.load(rows + matrix * most_rank + tl.arange(0, 16))
    row = tl.multiple_of(row, [of_16_bytes])
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
    start = tl.multiple_of(tl.load(columns + 2 * j), 8)
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
        row = tl.load(rows + matrix * most_rank + tl.arange(0, 16))
        row = tl.multiple_of(row, [of_16_bytes])
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


def expand_add(
    y: Tensor,
    s: Tensor,
    b: RankRows,
    tiles: TokenTiles,
    scales: Tensor | None = None,
    in_place: bool = True,
) -> Tensor:
    """y + scale · s Bᵀ of each token's own adapter.

    Args:
        y: [tokens, columns], rows contiguous and aligned as `check_tokens` says.
        s: of `shrink`.
        b: rows of B; of A for dx. Slices have columns of their own, or all the same ones, whose
            y is the sum over slices.
        tiles: as for s.
        scales: of s, [slices, slots], fp32.
        in_place: written over y; else what has no adapter is left undefined.
    Returns:
        y, or a contiguous tensor like it.
    Raises:
        CodegenError: y cannot be loaded 16 bytes at once, has too few columns, or s is of others.
    """
    check_tokens(y, b)
    check_partial_sums(s, b, tiles)
    is_decode, is_wide = tiles.block == DECODE_BLOCK, b.memory.dtype == torch.float32
    # y of 256 by 16 and 128 by 64 is 32 and 64 registers a thread; fp32 factors take registers too.
    block_n = (256 if is_decode else 128) // (2 if is_wide else 1)
    summed = b.slices if b.is_shared else 1
    z = y if in_place else torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if tiles.room.tiles:
        expand_kernel[(tiles.room.tiles, triton.cdiv(max(b.sizes), block_n), b.slices // summed)](
            y, y.stride(0), z, z.stride(0), tiles.order, tiles.tiles, b.memory, b.rows, b.ranks,
            b.columns, scales, s, b.slices, b.slots, tiles.room.places, b.most_rank,
            HAS_SCALES=scales is not None, SUMMED=summed, PARTS=s.shape[0],
            BLOCK_M=tiles.block, BLOCK_N=block_n,
            # Loads of decode's one step of most ranks go to registers, without a detour.
            num_warps=8 if is_wide and not is_decode else 4, num_stages=1 if is_decode else 2,
        )  # fmt: skip
    return z


# ------------------------------------------------------------------------------------- checks


def check_tokens(x: Tensor, rows: RankRows) -> None:
    """CodegenError: x [tokens, columns] is not what kernels load 16 bytes at once of."""
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


def check_partial_sums(s: Tensor, rows: RankRows, tiles: TokenTiles) -> None:
    """CodegenError: s is not of these matrices and places, or not what kernels index."""
    expected = (rows.slices, tiles.room.places, rows.most_rank)
    if s.shape[1:] != expected or s.dtype != torch.float32 or not s.is_contiguous():
        raise CodegenError(
            f"s {tuple(s.shape)} in {s.dtype} is not [parts, slices, places, ranks] of "
            f"{expected} in torch.float32, contiguous; make it by shrink with the same tiles"
        )
    if s.shape[3] % 16 or s.numel() >= 2**31:
        raise CodegenError(
            f"s {tuple(s.shape)}: most_rank is a multiple of 16, and there are fewer than 2**31 "
            "elements, which kernels index by 32 bits"
        )

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

Sources: Punica (Chen et al. 2023) §4, S-LoRA (Sheng et al. 2023) §5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.sizes import RANK_STEP, ROW_ALIGNMENT
from pcg.kernels.triton.adapters.lora_kernels import (
    expand_kernel,
    expand_tokens_kernel,
    outer_kernel,
    shrink_kernel,
)
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles, rank_block

# The sizes below follow from bytes and programs under way; benchmarks/gpu_lora.py times them.
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

"""Products by matrices of 4-bit codes, dequantized tile by tile in registers.

    y = x W̃ᵀ          dx = dy W̃          W̃ of `pcg.formats.format.Lookup`

A program has a tile of y (dx) and loops over the columns (rows) of W̃. It reads the codes and scales
of a tile of W̃, looks up the weights in fp32, rounds them to x's dtype, as `Format.dequantize` does,
and multiplies by tensor cores with fp32 sums. The whole W̃ never exists.

Shapes: T tokens, N rows of W̃ (out), K columns (in). Grid: tiles of N (K) times tiles of T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.formats.format import Lookup

_NESTED_BLOCKS = tl.constexpr(256)
"""Blocks of a nested scale (`pcg.formats.blocks4`)."""
TILE_TOKENS = 64
TILE_ROWS = 64
TILE_COLUMNS = 64


@triton.jit
def _tile(
    n, k, N, K, codes, scales, values, zeros, scale_values, nested, offset, first, row_blocks,
    BLOCK: tl.constexpr, HIGH_FIRST: tl.constexpr, HAS_VALUES: tl.constexpr,
    HAS_SCALE_VALUES: tl.constexpr, HAS_NESTED: tl.constexpr,
):  # fmt: skip
    """Return W̃ at rows n and columns k, broadcast against each other, in fp32; 0 outside."""
    inside = (n < N) & (k < K)
    row = n.to(tl.int64)
    byte = tl.load(codes + row * (K // 2) + k // 2, inside, other=0).to(tl.int32)
    is_high = (k % 2 == 0) if HIGH_FIRST else (k % 2 == 1)
    code = tl.where(is_high, byte >> 4, byte & 15)
    block = k // BLOCK
    place = row * (K // BLOCK) + block
    stored = tl.load(scales + place, inside, other=0)
    if HAS_SCALE_VALUES:
        scale = tl.load(scale_values + stored.to(tl.int32))
        if HAS_NESTED:
            number = first + row * row_blocks + block
            scale = scale * tl.load(nested + number // _NESTED_BLOCKS, inside, other=0.0) + offset
    else:
        scale = stored.to(tl.float32)
    if HAS_VALUES:
        weight = tl.load(values + code) * scale
    else:
        zero = tl.load(zeros + place, inside, other=0).to(tl.int32)
        # In the scales' dtype, as the libraries compute.
        weight = ((code - zero).to(tl.float32) * scale).to(scales.dtype.element_ty)
    return tl.where(inside, weight.to(tl.float32), 0.0)


@triton.jit
def linear(
    x, y, T, N, K, x_stride, y_stride, codes, scales, values, zeros, scale_values, nested, offset,
    first, row_blocks,
    BLOCK: tl.constexpr, HIGH_FIRST: tl.constexpr, HAS_VALUES: tl.constexpr,
    HAS_SCALE_VALUES: tl.constexpr, HAS_NESTED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [TOKENS, ROWS] of y."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, K, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        weight = _tile(
            n[None, :], k[:, None], N, K, codes, scales, values, zeros, scale_values, nested,
            offset, first, row_blocks, BLOCK, HIGH_FIRST, HAS_VALUES, HAS_SCALE_VALUES, HAS_NESTED,
        )  # fmt: skip
        inside = (t < T)[:, None] & (k < K)[None, :]
        tokens = tl.load(x + t.to(tl.int64)[:, None] * x_stride + k[None, :], inside, other=0.0)
        sums = tl.dot(tokens, weight.to(tokens.dtype), sums, input_precision="ieee")
    written = (t < T)[:, None] & (n < N)[None, :]
    place = y + t.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), written)


@triton.jit
def input_gradient(
    dy, dx, T, N, K, dy_stride, dx_stride, codes, scales, values, zeros, scale_values, nested,
    offset, first, row_blocks,
    BLOCK: tl.constexpr, HIGH_FIRST: tl.constexpr, HAS_VALUES: tl.constexpr,
    HAS_SCALE_VALUES: tl.constexpr, HAS_NESTED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add dy W̃ to a tile [TOKENS, COLUMNS] of dx."""
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, N, ROWS):
        n = start + tl.arange(0, ROWS)
        weight = _tile(
            n[:, None], k[None, :], N, K, codes, scales, values, zeros, scale_values, nested,
            offset, first, row_blocks, BLOCK, HIGH_FIRST, HAS_VALUES, HAS_SCALE_VALUES, HAS_NESTED,
        )  # fmt: skip
        inside = (t < T)[:, None] & (n < N)[None, :]
        rows = tl.load(dy + t.to(tl.int64)[:, None] * dy_stride + n[None, :], inside, other=0.0)
        sums = tl.dot(rows, weight.to(rows.dtype), sums, input_precision="ieee")
    written = (t < T)[:, None] & (k < K)[None, :]
    place = dx + t.to(tl.int64)[:, None] * dx_stride + k[None, :]
    before = tl.load(place, written, other=0.0)
    tl.store(place, before + sums.to(dx.dtype.element_ty), written)


class TritonProducts:
    """Products on NVIDIA GPUs; `pcg.kernels.torch.quantized.LookupProducts`."""

    def supports(self, x: Tensor) -> bool:
        return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)

    def linear(self, x: Tensor, lookup: Lookup, y: Tensor) -> None:
        """Write x W̃ᵀ into y.

        Args:
            x: [T, K], bf16, fp16 or fp32, with consecutive columns.
            y: [T, N], with consecutive columns; rows may have a stride.
        """
        if not len(x):
            return
        rows, columns, tokens = len(lookup.codes), x.shape[1], _tile_tokens(len(x))
        grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(len(x), tokens))
        linear[grid](
            x, y, len(x), rows, columns, x.stride(0), y.stride(0), *_arguments(lookup),
            **constants_of(lookup), TOKENS=tokens, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        )  # fmt: skip

    def input_gradient(self, dy: Tensor, lookup: Lookup, dx: Tensor) -> None:
        """Add dy W̃ to dx; the arguments are as for `linear`, and dx may be fp32."""
        if not len(dy):
            return
        rows, columns, tokens = len(lookup.codes), dx.shape[1], _tile_tokens(len(dy))
        grid = (triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(len(dy), tokens))
        input_gradient[grid](
            dy, dx, len(dy), rows, columns, dy.stride(0), dx.stride(0), *_arguments(lookup),
            **constants_of(lookup), TOKENS=tokens, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        )  # fmt: skip


def _tile_tokens(tokens: int) -> int:
    """Return a tile's tokens: few of a decode step, and at least the 16 of a tensor core."""
    power: int = triton.next_power_of_2(tokens)
    return min(TILE_TOKENS, max(16, power))


def _arguments(lookup: Lookup) -> tuple[object, ...]:
    codes = lookup.codes  # stands for absent tables, which are not read
    tables = (lookup.values, lookup.zeros, lookup.scale_values, lookup.nested)
    present = (codes if table is None else table for table in tables)
    return codes, lookup.scales, *present, lookup.offset, lookup.first, lookup.row_blocks


def constants_of(lookup: Lookup) -> dict[str, object]:
    """Return the constants of the kernels that a matrix's tables determine."""
    return {
        "BLOCK": lookup.block,
        "HIGH_FIRST": lookup.is_high_first,
        "HAS_VALUES": lookup.values is not None,
        "HAS_SCALE_VALUES": lookup.scale_values is not None,
        "HAS_NESTED": lookup.nested is not None,
    }

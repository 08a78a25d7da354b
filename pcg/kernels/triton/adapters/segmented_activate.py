"""The inner activation of bottleneck adapters, of many in a single launch.

    segmented_activate: z[j, p, k] = σ(s[j, p, k] + scale b[j, k]), or with dz
                        ds[j, p, k] = dz[j, p, k] · σ'(s[j, p, k] + scale b[j, k])
    segment_sum:        db[j, k] = scale Σ_p ds[j, p, k]

s and dz are partial sums, [parts, slices, sums] in fp32, as `shrink` returns them; z and ds have a
single part. A slot has as many k as its width, the ranks of its matrices; behind them z and ds are
0 up to the next multiple of 16, as s is. b is the only row of the place's slot in `rank_rows`, or 0
without. All is in fp32.

Grids: (blocks of k of tiles, slices); segment_sum (blocks of k of segments, slices).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.sizes import RANK_STEP
from pcg.kernels.triton.adapters.device_functions import (
    COUNTS,
    entries_of,
    item_of,
    sum_of_parts,
    sums_of,
)
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.token_tiles import TokenTiles, rank_block

FUNCTIONS = {"gelu": 0, "gelu_new": 1, "relu": 2, "silu": 3, "tanh": 4}
"""The kernels' numbers of the functions that `pcg.kernels.torch.bypass` knows by name."""

_BLOCK = 32
"""k at once: 16 elements a thread of a prefill's tile, some eight registers for each."""


@triton.jit
def tanh(x):
    """tanh(x): its series near 0, where 1 - exp(-2|x|) loses the digits; 1e-7 of itself."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    q = x * x
    series = -17.0 / 315.0 + q * (62.0 / 2835.0 - q * (1382.0 / 155925.0))
    near = x + x * q * (-1.0 / 3.0 + q * (2.0 / 15.0 + q * series))
    return tl.where(tl.abs(x) < 0.3, near, far)


@triton.jit
def activation(x, FUNCTION: tl.constexpr):
    """σ(x) and σ'(x)."""
    if FUNCTION == 0:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif FUNCTION == 1:
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = 0.5 * x * (1.0 + t)
        inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    elif FUNCTION == 2:
        y = tl.where(x > 0, x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif FUNCTION == 3:
        gate = 1.0 / (1.0 + tl.exp(-x))
        y = x * gate
        slope = gate * (1.0 + x * (1.0 - gate))
    else:
        y = tanh(x)
        slope = 1.0 - y * y
    return y, slope


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["tiles"])
def activate_kernel(
    s, dz, out, tiles, widths, memory, rows, ranks, scales, first, slices, slots, sums,
    FUNCTION: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, GRADIENT_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Compute z, or ds with HAS_GRADIENT, for a tile and up to RANKS of a slice's k."""
    j = tl.program_id(1)
    matrix, width, _, count = item_of(tiles, slots, widths, j)
    if count == 0:
        return
    stride, entries = entries_of(tiles, rows, first + j)
    stride = tl.multiple_of(stride, 16)
    of_tile, first_k = sums_of(tiles, 0, j, sums)
    bias_width = width * tl.load(ranks + matrix)
    row = tl.load(entries)
    m = tl.arange(0, BLOCK_M)
    for low in range(first_k, tl.minimum(width, first_k + RANKS), BLOCK_R):
        k = low + tl.arange(0, BLOCK_R)
        bias = tl.load(memory + row + k, k < bias_width, 0.0).to(tl.float32)
        if HAS_SCALES:
            bias *= tl.load(scales + matrix)
        at = (of_tile + m * stride)[:, None] + k[None, :]
        # Up to where s is defined: a multiple of 16, so that loads are of 16 bytes.
        chosen = (m < count)[:, None] & (k < (width + 15) // 16 * 16)[None, :]
        parts = tl.multiple_of(slices * sums, 16)
        value, slope = activation(sum_of_parts(s, at, parts, chosen, PARTS) + bias, FUNCTION)
        if HAS_GRADIENT:
            value = sum_of_parts(dz, at, parts, chosen, GRADIENT_PARTS) * slope
        tl.store(out + at, tl.where((k < width)[None, :], value, 0.0), chosen)


def segmented_activate(
    s: Tensor,
    biases: RankRows,
    widths: Tensor,
    tiles: TokenTiles,
    function: str,
    scales: Tensor | None = None,
    dz: Tensor | None = None,
) -> Tensor:
    """Return σ(s + scale · b) of each token's adapter; with dz, ds = dz · σ'(s + scale · b).

    Args:
        s: the partial sums of `shrink`, [parts, slices, sums], fp32; dz likewise.
        biases: a row of `width` elements for each slot that has a bias; their sizes are not read.
        widths: ranks of the matrices that gave s, [slices, slots], int32.
        tiles: the tiles of s.
        function: σ's name.
        scales: factors on the biases, [slices, slots], fp32.
        dz: the gradient by the activation; the result has a single part.
    Raises:
        CodegenError: no such function.
    """
    if function not in FUNCTIONS:
        raise CodegenError(f"activation {function!r}; there are {', '.join(FUNCTIONS)}")
    _, slices, sums = s.shape
    out = torch.empty((1, *s.shape[1:]), dtype=torch.float32, device=s.device)
    items, ranks = len(tiles.tiles), rank_block(tiles.block)
    if items:
        activate_kernel[(items, slices)](
            s, dz, out, tiles.tiles, widths, biases.memory, biases.rows, biases.ranks, scales,
            biases.first, slices, biases.slots, sums,
            FUNCTION=FUNCTIONS[function], HAS_SCALES=scales is not None,
            HAS_GRADIENT=dz is not None,
            PARTS=s.shape[0], GRADIENT_PARTS=1 if dz is None else dz.shape[0],
            BLOCK_M=tiles.block, BLOCK_R=min(_BLOCK, ranks), RANKS=ranks,
            num_warps=4 if ranks > _BLOCK else 1,  # 8 elements a thread of a decode's tile
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=COUNTS[1:], do_not_specialize_on_alignment=["segments"])
def sum_kernel(
    ds, segments, widths, memory, rows, ranks, scales, first, slots, sums,
    HAS_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK_R k of a segment's db of a slice, in lines of places as `inner_kernel` does."""
    j = tl.program_id(1)
    matrix, width, _, count = item_of(segments, slots, widths, j)
    ds, first_k = sums_of(segments, ds, j, sums)
    if (count == 0) | (tl.load(ranks + matrix) == 0) | (first_k >= width):
        return
    stride, entries = entries_of(segments, rows, first + j)
    stride = tl.multiple_of(stride, 16)
    k = first_k + tl.arange(0, BLOCK_R)
    defined = (k < (width + 15) // 16 * 16)[None, :]
    lines = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for first_token in range(0, count, BLOCK_T):
        t = first_token + tl.arange(0, BLOCK_T)
        at = t[:, None] * stride + k[None, :]
        lines += tl.load(ds + at, (t < count)[:, None] & defined, 0.0)
    total = tl.sum(lines, 0)
    if HAS_SCALES:
        total *= tl.load(scales + matrix)
    tl.store(memory + tl.load(entries) + k, total, k < width)


def segment_sum(
    ds: Tensor, gradients: RankRows, widths: Tensor, tiles: TokenTiles, scales: Tensor | None = None
) -> None:
    """Write scale · Σ ds over each segment's places; other slots are left as they are.

    `gradients` holds the biases' gradients, in fp32; widths, tiles and scales are those of the
    `segmented_activate` that returned ds.

    Raises:
        CodegenError: ds is of several parts, or gradients are not fp32.
    """
    parts, slices, sums = ds.shape
    if parts != 1 or gradients.memory.dtype != torch.float32:
        raise CodegenError(
            f"ds of {parts} parts and gradients in {gradients.memory.dtype}; one part and "
            "torch.float32 can be added up"
        )
    items = len(tiles.segments)
    if items:
        sum_kernel[(items, slices)](
            ds, tiles.segments, widths, gradients.memory, gradients.rows, gradients.ranks, scales,
            gradients.first, gradients.slots, sums,
            HAS_SCALES=scales is not None,
            BLOCK_T=32, BLOCK_R=RANK_STEP, num_warps=4, num_stages=2,
        )  # fmt: skip

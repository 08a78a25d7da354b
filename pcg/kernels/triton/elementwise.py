"""Element-wise kernels: dropout by counted random numbers, and packed signs of ReLU.

    y[t, c] = x[t, c] / (1 - p)  if u(t, c) >= p, else 0
    u(t, c) = Philox-4x32-10(key; c, position of t, sequence of t, layer and operator) / 2^32

The key is the pass's and lies on the device, so that a recorded layer drops other elements in each
replay. The dropped elements of a token depend neither on how its sequence is cut into windows nor
on whether these are recorded, and backward draws them again.

Philox: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).

    signs_i = Σ_j (y_{8i + j} > 0) · 2^j
    dx_{8i + j} = dy_{8i + j} if bit j of signs_i is set, else 0

Shapes: x, y, dy, dx: [T, n]; positions, sequences: [T]; key: [2], the key, and 0 if nothing is
dropped; signs: [.., n / 8], u8. Grids: a program for ROWS tokens and COLUMNS features; one for
BLOCK bytes of signs, which are 8 BLOCK elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.kernels.batch import ProgramBatch

ROWS, COLUMNS = 2, 1024
"""A program's tile: 16 numbers a thread of 4 warps."""
_KEYS = 1 << 16
"""More than a layer has operators that drop."""


@triton.jit(do_not_specialize=["tokens", "place"])
def drop(
    x,
    y,
    positions,
    sequences,
    key,
    tokens,
    place,
    x_stride,
    p: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Drop numbers of a tile of x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_rows = row < tokens
    inside = in_rows[:, None] & (column < FEATURES)
    token = row.to(tl.int64)[:, None]
    position = tl.load(positions + row, in_rows, other=0).to(tl.int32)
    sequence = tl.load(sequences + row, in_rows, other=0).to(tl.int32)
    zeros = tl.zeros([ROWS, COLUMNS], tl.int32)
    drawn, _, _, _ = tl.philox(
        tl.load(key),
        column + zeros,
        position[:, None] + zeros,
        sequence[:, None] + zeros,
        place + zeros,
    )
    # 24 of the bits, which fp32 has exactly.
    u = (drawn >> 8).to(tl.float32) * (1.0 / 16777216.0)
    value = tl.load(x + token * x_stride + column, inside, other=0.0)
    scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    left = tl.where(u >= p, value * scale, 0.0)
    is_on = tl.load(key + 1) != 0
    tl.store(y + token * FEATURES + column, tl.where(is_on, left, value), inside)


def dropout(batch: ProgramBatch, x: Tensor, p: float, key: int) -> Tensor:
    """Return x · mask / (1 - p), drawn for each pass, layer and key; x outside of training."""
    places = batch.dropped_tokens()
    if places is None:
        return x
    positions, sequences = places.positions, places.sequences
    if batch.chosen is not None:
        positions, sequences = positions[batch.chosen], sequences[batch.chosen]
    whole = x.flatten(1)
    whole = whole if whole.stride(-1) == 1 else whole.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, features = whole.shape
    if tokens:
        columns = min(COLUMNS, triton.next_power_of_2(features))
        drop[triton.cdiv(tokens, ROWS), triton.cdiv(features, columns)](
            whole,
            y,
            positions,
            sequences,
            places.key,
            tokens,
            batch.layer * _KEYS + key,
            whole.stride(0),
            p=p,
            FEATURES=features,
            ROWS=ROWS,
            COLUMNS=columns,
        )
    return y


PROGRAM_BYTES = 16384
"""Bytes of y or dy of a program of 4 warps: eight loads of 16 bytes a thread are under way."""


@triton.jit
def pack(y, signs, count, BLOCK: tl.constexpr):
    """Signs of `count` bytes."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    inside = byte < count
    value = tl.load(y + byte[:, None] * 8 + bit[None, :], inside[:, None], other=0.0)
    bits = (value > 0).to(tl.int32) << bit[None, :]
    tl.store(signs + byte, tl.sum(bits, 1).to(tl.uint8), inside)


@triton.jit
def unpack(dy, signs, dx, count, BLOCK: tl.constexpr):
    """dy where the bit is set."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    inside = byte < count
    place = byte[:, None] * 8 + bit[None, :]
    packed = tl.load(signs + byte, inside, other=0).to(tl.int32)
    is_set = ((packed[:, None] >> bit[None, :]) & 1) != 0
    value = tl.load(dy + place, inside[:, None], other=0.0)
    tl.store(dx + place, tl.where(is_set, value, 0.0), inside[:, None])


def pack_signs(y: Tensor) -> Tensor:
    """Pack the signs of y [.., n], eight in a byte: u8 [.., n / 8], the first in the lowest bit."""
    y = y.contiguous()
    signs = y.new_empty((*y.shape[:-1], y.shape[-1] // 8), dtype=torch.uint8)
    count = signs.numel()
    if count:
        block = _block(y)
        pack[(triton.cdiv(count, block),)](y, signs, count, BLOCK=block)
    return signs


def relu_backward_packed(dy: Tensor, signs: Tensor) -> Tensor:
    """dx [.., n]: dy where the packed sign is set, else 0."""
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    count = signs.numel()
    if count:
        block = _block(dy)
        unpack[(triton.cdiv(count, block),)](dy, signs, dx, count, BLOCK=block)
    return dx


def _block(y: Tensor) -> int:
    return PROGRAM_BYTES // (8 * y.element_size())

"""ReLU's signs, eight in a byte: what is kept of its output for the backward pass.

    signs_i = Σ_j (y_{8i + j} > 0) · 2^j
    dx_{8i + j} = dy_{8i + j} if bit j of signs_i is set, else 0

Shapes: y, dy, dx: [.., n]; signs: [.., n / 8], u8.
Grid: a program for BLOCK bytes of signs, which are 8 BLOCK elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """Bits of the positive elements of y [.., n]: u8 [.., n / 8], the first in the lowest bit."""
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
    """Bytes of signs of a program."""
    return PROGRAM_BYTES // (8 * y.element_size())

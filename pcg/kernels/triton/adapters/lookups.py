"""Look-ups of segmented kernels in tables of tokens (`token_tiles`) and of rows (`rank_rows`)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ["slices", "slots", "places"]
"""Arguments of any value: kernels are not compiled anew for those that 16 divides, or for 1."""


@triton.jit
def segment_of(segments):
    """Slot, first place and places of the program's segment, or tile of one."""
    segment = segments + 3 * tl.program_id(0)
    return tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)


@triton.jit
def columns_of(columns, j):
    """First column and columns of a slice: multiples of 8."""
    start = tl.multiple_of(tl.load(columns + 2 * j), 8)
    return start, tl.multiple_of(tl.load(columns + 2 * j + 1), 8)


@triton.jit
def tokens_at(order, place, taken, stride):
    """First element of the token at each place: a multiple of 8, as the stride is."""
    token = tl.load(order + place, taken, 0).to(tl.int64)
    return tl.multiple_of(token * stride, [8])


@triton.jit
def rows_at(rows, memory, inside=None):
    """First elements of rows in a memory: multiples of 16 bytes."""
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    if inside is None:
        row = tl.multiple_of(tl.load(rows), [of_16_bytes])
    else:
        row = tl.multiple_of(tl.load(rows, inside, 0), [of_16_bytes])
    return row

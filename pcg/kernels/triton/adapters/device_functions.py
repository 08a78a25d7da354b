"""Device functions of segmented kernels: look-ups in tables of tokens and rows, and products.

Products of an fp32 factor run on tensor cores that take 16 bits:

    total + w s,  s = high + low, each of w's dtype

bf16 keeps 16 bits of s so, and fp16 22, where each column of s is taken into its range by a power
of two. The product's error is at most 2^-16 |w| |s| for bf16, where rounding s to bf16 costs 2^-9.
An fp32 w takes no tensor core, and no error but that of fp32 sums.

High and low are the second factor, which Hopper's tensor cores read from shared memory. The first
one they also take from registers, and old ptxas can miscompile that where it comes straight from a
conversion (triton-lang/triton#9433).
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ["slices", "slots", "places"]
"""Arguments of any value: kernels are not compiled anew for those that 16 divides, or for 1."""


@triton.jit
def segment_of(segments, slots, ranks, j):
    """Matrix of slice j, its rank, first place and places of the program's segment or tile."""
    segment = segments + 3 * tl.program_id(0)
    matrix = j * slots + tl.load(segment)
    return matrix, tl.load(ranks + matrix), tl.load(segment + 1), tl.load(segment + 2)


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


@triton.jit
def wide_product(w, s, total):
    """total + w s, for w [N, K] of bf16, fp16 or fp32, s [K, M] and total [N, M] of fp32."""
    if w.dtype == tl.float32:
        total = tl.dot(w, s, total, input_precision="ieee")
    elif w.dtype == tl.bfloat16:
        high = s.to(tl.bfloat16)
        low = (s - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(w, high, total)
        total = tl.dot(w, low, total)
    else:
        # The exponents of each column's greatest, kept where the inverse is a number too.
        bits = tl.max(tl.abs(s), 0).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x0D800000), 0x71800000)
        power = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        s = s * inverse[None, :]
        high = s.to(tl.float16)
        low = (s - high.to(tl.float32)).to(tl.float16)
        zero = tl.zeros(total.shape, tl.float32)
        total += tl.dot(w, low, tl.dot(w, high, zero)) * power[None, :]
    return total


@triton.jit
def sum_of_parts(s, at, stride, inside, PARTS: tl.constexpr):
    """The sum of the PARTS blocks s + at, s + at + stride, …, in order; 0 where not inside."""
    total = tl.load(s + at, inside, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(s + at + part * stride, inside, 0.0)
    return total

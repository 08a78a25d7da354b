"""Device functions of segmented kernels: look-ups in tables of tokens and rows, and products.

Products of an fp32 factor run on tensor cores that take 16 bits:

    total + w s,  s = high + low, each of w's dtype

bf16 keeps 16 bits of s so, and fp16 22, where each column of s is scaled into its range by a power
of two. The product's error is at most 2^-16 |w| |s| for bf16, where rounding s to bf16 costs 2^-9.
An fp32 w takes no tensor core, and has no error but that of fp32 sums.

High and low are the second factor, which Hopper's tensor cores read from shared memory. They can
read the first factor from registers, too, and old ptxas can miscompile that if it is loaded
straight from a conversion (triton-lang/triton#9433).
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ["slices", "slots", "first", "sums"]
"""Arguments of any value: kernels are not compiled anew for those that 16 divides, or for 1."""


@triton.jit
def item_of(items, slots, ranks, j):
    """Place of slice j in `ranks`, its rank, first place and places of the program's item."""
    item = items + 8 * tl.program_id(0)
    matrix = j * slots + tl.load(item)
    return matrix, tl.load(ranks + matrix), tl.load(item + 1), tl.load(item + 2)


@triton.jit
def entries_of(items, rows, matrix):
    """The program's item: its width, and where `rows` have its entries of a matrix."""
    item = items + 8 * tl.program_id(0)
    width = tl.load(item + 3)
    return width, rows + tl.load(item + 4) + matrix * width


@triton.jit
def sums_of(items, s, part_or_slice, sums):
    """The program's item: its first sum of a part's slice, and the first of its block of ranks.

    It is a multiple of 16, as all widths of sums are.
    """
    item = items + 8 * tl.program_id(0)
    at = tl.multiple_of(part_or_slice * sums + tl.load(item + 5), 16)
    return s + at, tl.multiple_of(tl.load(item + 6), 16)


@triton.jit
def columns_of(columns, j):
    """First column and columns of a slice: multiples of 8."""
    start = tl.multiple_of(tl.load(columns + 2 * j), 8)
    return start, tl.multiple_of(tl.load(columns + 2 * j + 1), 8)


@triton.jit
def of_slice(j, first, second, third, SLICES: tl.constexpr):
    """Select slice j's pointer or number of three if there are SLICES of them, else the first."""
    chosen = first
    if SLICES > 1:
        chosen = tl.where(j == 1, second, chosen)
    if SLICES > 2:
        chosen = tl.where(j == 2, third, chosen)
    return chosen


@triton.jit
def tokens_at(order, place, taken, stride):
    """First element of the token at each place: a multiple of 8, as the stride is."""
    token = tl.load(order + place, taken, 0).to(tl.int64)
    return tl.multiple_of(token * stride, [8])


@triton.jit
def rows_at(rows, memory, inside=None):
    """Return first elements of rows in a memory: multiples of 16 bytes."""
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    if inside is None:
        row = tl.multiple_of(tl.load(rows), [of_16_bytes])
    else:
        row = tl.multiple_of(tl.load(rows, inside, 0), [of_16_bytes])
    return row


@triton.jit
def wide_product(w, s, total):
    """Return total + w s, for w [N, K] of bf16, fp16 or fp32, s [K, M] and total [N, M] of fp32."""
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
def token_of(by_token, rows, slots, ranks, matrix, j):
    """Return a token's place of slice j in `ranks`, rank, entries of a matrix, and first sum.

    `by_token` points to the token's numbers; the rank is 0 without an adapter.
    """
    slot = tl.load(by_token)
    at = j * slots + slot
    rank = tl.load(ranks + at, slot >= 0, 0)
    entries = rows + tl.load(by_token + 2) + matrix * tl.load(by_token + 1)
    return at, rank, entries, tl.multiple_of(tl.load(by_token + 3), 16)


@triton.jit
def expand_token(
    total, memory, entries, rank, n, inside, s, part_stride, scale,
    PARTS: tl.constexpr, PART_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return total [N] + scale · Σ_k s[k] · B[k, n] of a token and a matrix, in fp32.

    `entries` are the matrix's in the table of rows, `s` the token's sums of it, of the first part.
    A program needs no other token's adapter, and no tensor cores: B is read once either way.
    PART_BLOCK is the power of two that holds PARTS. Rows of STAGES steps of 16 ranks are in flight
    together: two or more take a detour through shared memory, which pays for wide adapters.
    """
    part = tl.arange(0, PART_BLOCK)
    at = (part * part_stride)[:, None]
    for first_rank in tl.range(0, rank, 16, num_stages=STAGES):
        k = first_rank + tl.arange(0, 16)
        row = rows_at(entries + k, memory, k < rank)
        chosen = (part < PARTS)[:, None] & (k < rank)[None, :]
        factors = tl.sum(tl.load(s + at + k[None, :], chosen, 0.0), 0) * scale
        b = tl.load(memory + row[:, None] + n[None, :], (k < rank)[:, None] & inside[None, :], 0.0)
        total += tl.sum(b.to(tl.float32) * factors[:, None], 0)
    return total


@triton.jit
def sum_of_parts(s, at, stride, inside, PARTS: tl.constexpr):
    """Sum the PARTS blocks s + at, s + at + stride, …, in order; 0 where not inside."""
    total = tl.load(s + at, inside, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(s + at + part * stride, inside, 0.0)
    return total

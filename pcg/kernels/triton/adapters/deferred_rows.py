"""A device function: LoRA's summand of a tile, for kernels that add it as they read a product.

    d[token, column] = Σ_k s[place, k] · Bᵀ[k, column],   s = Σ_part s_part

Each token has an adapter of its own or none, and its products are its own: a program reads the
columns of B that it needs for each of its tokens, 8 ranks at once, and multiplies in fp32 without
tensor cores. For one token of an adapter that reads each byte of B once, as a kernel of tiles does;
for many of the same adapter it reads B from the cache again and again, so it is for few tokens.

    places [T, 2]    of each token its adapter's slot, -1 without one, and its place in s
    matrix, place    of the product's slice the number of its first matrix, of its first place
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def deferred_rows(
    places, s, memory, rows, ranks, matrix, place, most_rank, part_stride, parts,
    token, column, in_rows, inside,
    PARTS: tl.constexpr,
):  # fmt: skip
    """d of tokens [R, 1] and columns [1, C] or [R, C], fp32; 0 where not inside.

    Args:
        places, s, memory, rows, ranks, matrix, place: see the module.
        most_rank: ranks of a matrix in the table of rows, and of a place in s.
        part_stride: elements of a part of s, of which there are `parts`, at most PARTS.
        token: [R, 1], int64; `in_rows` says which are there.
        inside: the condition of elements, [R, 1] or [R, C].
    """
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    slot = tl.load(places + 2 * token, in_rows, -1)
    has_adapter = slot >= 0
    matrix += slot
    rank = tl.load(ranks + matrix, has_adapter, 0)
    own_s = s + (place + tl.load(places + 2 * token + 1, has_adapter, 0)) * most_rank
    own_rows = rows + matrix * most_rank
    total = tl.zeros(inside.shape, tl.float32) * tl.zeros(column.shape, tl.float32)
    part = tl.arange(0, PARTS)[None, :, None]
    for first in range(0, tl.max(rank), 8):
        k = first + tl.arange(0, 8)[None, :]
        kept = k < rank
        row = tl.multiple_of(tl.load(own_rows + k, kept, 0), [of_16_bytes, of_16_bytes])
        at = row[:, :, None] + column[:, None, :]
        b = tl.load(memory + at, kept[:, :, None] & inside[:, None, :], 0.0)
        each = (own_s + k)[:, None, :] + part * part_stride
        own = tl.sum(tl.load(each, kept[:, None, :] & (part < parts), 0.0), 1)
        total += tl.sum(b.to(tl.float32) * own[:, :, None], 1)
    return total

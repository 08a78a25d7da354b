"""A device function: LoRA's summand of a tile, for kernels that add it as they read a product.

    d[token, column] = Σ_k s[token, k] · Bᵀ[k, column],   s = Σ_part s_part

Each token has an adapter of its own or none, as decode's expand takes them (`lora_kernels`): a
program reads the columns of B that it needs for each of its tokens, 8 ranks at once, or 4 of more
than 4096 columns, and multiplies in fp32 without tensor cores. So a tile may have several tokens,
and a part of the columns twice.

    by_token    the adapter of each token (`token_tiles`)
    matrix      number of the slice's B among the matrices of each adapter
    first_rank  the slice's first place in `ranks`, first_sum in a part of s
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def deferred_rows(
    by_token, s, memory, rows, ranks, matrix, first_rank, first_sum, part_stride, parts,
    token, column, in_rows, inside,
    PARTS: tl.constexpr,
):  # fmt: skip
    """d of tokens [R, 1] and columns [1, C] or [R, C], fp32; 0 where not inside.

    Args:
        by_token, s, memory, rows, ranks, matrix, first_rank, first_sum: see the module.
        part_stride: elements of a part of s, of which there are `parts`, at most PARTS.
        token: [R, 1], int64; `in_rows` says which are there.
        inside: the condition of elements, [R, 1] or [R, C].
    """
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    by_token += 4 * token
    slot = tl.load(by_token, in_rows, -1)
    has_adapter = slot >= 0
    rank = tl.load(ranks + first_rank + slot, has_adapter, 0)
    width = tl.load(by_token + 1, has_adapter, 0)
    entries = rows + tl.load(by_token + 2, has_adapter, 0) + matrix * width
    own_s = s + first_sum + tl.load(by_token + 3, has_adapter, 0)
    total = tl.zeros(inside.shape, tl.float32) * tl.zeros(column.shape, tl.float32)
    part = tl.arange(0, PARTS)[None, :, None]
    # Of wider tiles registers hold fewer: 32 warps have 64 each for a thread.
    AT_ONCE: tl.constexpr = 8 if column.shape[1] <= 4096 else 4
    for first in range(0, tl.max(rank), AT_ONCE):
        k = first + tl.arange(0, AT_ONCE)[None, :]
        kept = k < rank
        row = tl.multiple_of(tl.load(entries + k, kept, 0), [of_16_bytes, of_16_bytes])
        at = row[:, :, None] + column[:, None, :]
        b = tl.load(memory + at, kept[:, :, None] & inside[:, None, :], 0.0)
        each = (own_s + k)[:, None, :] + part * part_stride
        own = tl.sum(tl.load(each, kept[:, None, :] & (part < parts), 0.0), 1)
        total += tl.sum(b.to(tl.float32) * own[:, :, None], 1)
    return total

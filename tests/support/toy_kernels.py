"""Kernels that show what the interpreter, the sanitizer and the machine code's reader find."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, shift, BLOCK: tl.constexpr):
    """out = x + y, stored `shift` elements further."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    total = tl.load(x + index, inside) + tl.load(y + index, inside)
    tl.store(out + shift + index, total, inside)


@triton.jit
def product(a, b, out, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """out = a b for one block of rows and columns."""
    m = tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + (start + k)[:, None] * BLOCK + m[None, :])
        total += tl.dot(left, right)
    tl.store(out + m[:, None] * BLOCK + m[None, :], total)

"""The loss of a frozen head and the gradient of its input, of a chunk of tokens at a time.

    z = x Wᵀ + bias          l = softcap · tanh(scale · z / softcap), or scale · z
    loss = log Σ_v exp(l_v) - l_target                 0 where the target is negative
    dz = dloss · (softmax(l) - onehot(target)) · dl/dz          dx = dz W

The products are torch's. Between the two a kernel goes over each row of z, a block of columns at a
time: for the maximum and the sum, and again to write dz over z. So only z of a chunk exists of
[T, V]: the idea of Liger Kernel (Hsu et al. 2024, section 3.2). W is frozen.

Shapes: T tokens, h hidden, V vocabulary. z is rounded to x's dtype; l, the sums and dz are computed
in fp32, in fp64 of fp64. Sums are in a fixed order. Grid: a program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 128 * 2**20
"""Bytes of z. With 128k words in bf16 that is 512 tokens: a product does 2 · 512 FLOPs for each
weight of two bytes that it reads, where an H200 can do 206 for each byte (989 TFLOP/s by 4.8 TB/s).
"""
CHUNK_STEP = 128
"""Rows of a tile of a matrix product: a chunk is a multiple."""
BLOCK = 4096
"""Columns at a time: of 512 threads each has one load of 16 bytes in bf16, two in fp32, and at most
64 registers, so that one program can read while another waits for its maximum."""
_LOWEST = tl.constexpr(-3.0e38)
"""Below all logits, and finite: the first block of a row may be -inf throughout."""


@triton.jit
def _logits(z, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    logits = z * SCALE if SCALE != 1.0 else z
    if SOFTCAP != 0.0:
        shrunk = tl.exp(-2.0 * tl.abs(logits / SOFTCAP))  # at most 1: nothing overflows
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        logits = tl.where(logits < 0, -SOFTCAP * tanh, SOFTCAP * tanh)
    return logits


@triton.jit
def _load_logits(
    row, start, V, stride, behind, SCALE, SOFTCAP, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return l of a block; `behind` where the buffer's padding is read, which stays 0."""
    v = start + tl.arange(0, BLOCK)
    z = tl.load(row + v, v < stride, other=0.0).to(WIDE)
    return v, tl.where(v < V, _logits(z, SCALE, SOFTCAP), behind)


@triton.jit
def _sum_of_exp(row, V, stride, SCALE, SOFTCAP, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return max l, and Σ exp(l - max l)."""
    top = tl.full((), _LOWEST, WIDE)
    sums = tl.zeros((BLOCK,), WIDE)
    for start in range(0, V, BLOCK):
        _, logits = _load_logits(row, start, V, stride, float("-inf"), SCALE, SOFTCAP, WIDE, BLOCK)
        higher = tl.maximum(top, tl.max(logits, 0))
        sums = sums * tl.exp(top - higher) + tl.exp(logits - higher)
        top = higher
    return top, tl.sum(sums, 0)


@triton.jit
def _write_gradient(
    row, V, stride, target, slope, top, total,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dz over z; 0 without a target, whatever z is."""
    slope *= SCALE
    inverse = 1.0 / total
    for start in range(0, V, BLOCK):
        v, logits = _load_logits(row, start, V, stride, top, SCALE, SOFTCAP, WIDE, BLOCK)
        d = tl.exp(logits - top) * inverse - tl.where(v == target, 1.0, 0.0)
        if SOFTCAP != 0.0:
            tanh = logits / SOFTCAP
            d *= 1.0 - tanh * tanh
        d = tl.where((target >= 0) & (v < V), d * slope, 0.0)
        tl.store(row + v, d.to(row.dtype.element_ty), v < stride)


@triton.jit
def _target_logit(row, target, V, SCALE, SOFTCAP, WIDE: tl.constexpr):
    """Return l of the target; NaN if it is beyond the vocabulary."""
    z = tl.load(row + target, (target >= 0) & (target < V), other=0.0).to(WIDE)
    # Before any thread of the program writes the gradient there.
    tl.debug_barrier()
    return tl.where(target < V, _logits(z, SCALE, SOFTCAP), float("nan"))


@triton.jit
def loss_rows(
    z, targets, dloss, loss, V, stride,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TRAINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a row, and if it TRAINS, write dz over z."""
    WIDE: tl.constexpr = loss.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    row = z + token * stride
    target = tl.load(targets + token)
    wanted = _target_logit(row, target, V, SCALE, SOFTCAP, WIDE)
    top, total = _sum_of_exp(row, V, stride, SCALE, SOFTCAP, WIDE, BLOCK)
    tl.store(loss + token, tl.where(target < 0, 0.0, tl.log(total) - (wanted - top)))
    if TRAINS:
        slope = tl.load(dloss + token)
        _write_gradient(row, V, stride, target, slope, top, total, SCALE, SOFTCAP, WIDE, BLOCK)


def chunk_tokens(vocabulary: int, element_bytes: int) -> int:
    """Return the tokens of a chunk: as many CHUNK_STEPs as CHUNK_BYTES hold, at least one."""
    fitting = CHUNK_BYTES // (vocabulary * element_bytes)
    return max(1, fitting // CHUNK_STEP) * CHUNK_STEP


@torch.no_grad()
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dloss: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute each token's loss, and with `dloss` the gradient of x.

    Args:
        x: [T, h].
        weight: the head's, [V, h], in x's dtype.
        targets: [T], int64; negative for none. A target beyond the vocabulary gives NaN.
        dloss: [T], fp32 (fp64 of fp64); None for only the loss.
        bias: [V].
        scale: factor of the logits.
        softcap: bound of the logits; 0 for none.
        chunk: tokens of a chunk; by default `chunk_tokens`.
    Returns:
        loss: [T], fp32 (fp64 of fp64).
        dx: [T, h], in x's dtype; None without `dloss`.
    """
    tokens, vocabulary = x.shape[0], weight.shape[0]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    loss = torch.empty(tokens, dtype=wide, device=x.device)
    dx = None if dloss is None else torch.empty_like(x)
    size = chunk or chunk_tokens(vocabulary, x.element_size())
    stride = triton.cdiv(vocabulary, 16) * 16  # every row starts at a multiple of 16 bytes
    room = torch.empty((min(size, tokens), stride), dtype=x.dtype, device=x.device)
    room[:, vocabulary:].zero_()
    block = min(BLOCK, triton.next_power_of_2(vocabulary))  # a narrow row is one block
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        rows = x[part]
        z = room[: rows.shape[0], :vocabulary]
        if bias is None:
            torch.mm(rows, weight.t(), out=z)
        else:
            torch.addmm(bias, rows, weight.t(), out=z)
        loss_rows[(len(z),)](
            z, targets[part], None if dloss is None else dloss[part], loss[part], vocabulary,
            stride, SCALE=scale, SOFTCAP=softcap, TRAINS=dloss is not None, BLOCK=block,
            num_warps=max(1, block // 256),
        )  # fmt: skip
        if dx is not None:
            torch.mm(z, weight, out=dx[part])
    return loss, dx

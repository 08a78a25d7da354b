"""The tokens that top-k and top-p keep of each row, without sorting it.

    x_v = (l_v - max l) / temperature;  p_v = exp x_v
    top-k   keeps x_v >= c, the k-th largest; of equal ones all
    top-p   removes, from the smallest x on and of equal ones from the first on, tokens whose
            probabilities add up to at most (1 - p) of all that top-k keeps; never the last one

Both are a threshold, which is found between two values of the row: a pass counts, or adds up, what
is above the middle of the two, and finds the values next to it, which take the place of one of the
two. It ends when both are the same, after some 10 to 20 passes over a row that lies in L2.

Shapes: R rows, V vocabulary. Sums are in fp64, in a fixed order. Grid: a program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.kernels.token_limits import TokenLimits

SEARCH_BLOCK = 4096
"""Columns at a time: of 1,024 threads each holds four counts or sums, and eight neighbours."""
LOWEST = tl.constexpr(-1.0e30)
"""Below all logits that count, and finite, so that a row of -inf alone has a maximum."""


@triton.jit
def highest(row, V, BLOCK: tl.constexpr):
    """The largest logit of a row, fp32."""
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(row + v, v < V, other=float("-inf")).to(tl.float32))
    return tl.max(top, 0)


@triton.jit
def scaled(row, start, V, top, temperature, BLOCK: tl.constexpr):
    """Tokens of a block, and their x; -inf behind the row."""
    v = start + tl.arange(0, BLOCK)
    value = tl.load(row + v, v < V, other=float("-inf")).to(tl.float32)
    # The maximum goes before the division, so that no temperature divides to infinity.
    return v, tl.div_rn(value - top, temperature)


@triton.jit
def _lowest(row, V, top, temperature, BLOCK: tl.constexpr):
    """The smallest x above -inf; 0, the largest, where there is none."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        _, x = scaled(row, start, V, top, temperature, BLOCK)
        least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
    found = tl.min(least, 0)
    return tl.where(found < float("inf"), found, 0.0)


@triton.jit
def _above(row, V, top, temperature, middle, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The number of x above `middle`, or the sum of their p, and the two next to it.

    These are the smallest x above `middle`, and the largest of the others.
    """
    amount = tl.zeros((BLOCK,), tl.float64 if WEIGHED else tl.int32)
    higher = tl.full((BLOCK,), float("inf"), tl.float32)
    lower = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        _, x = scaled(row, start, V, top, temperature, BLOCK)
        is_above = x > middle
        if WEIGHED:
            amount += tl.where(is_above, tl.exp(x), 0.0).to(tl.float64)
        else:
            amount += is_above.to(tl.int32)
        higher = tl.minimum(higher, tl.where(is_above, x, float("inf")))
        lower = tl.maximum(lower, tl.where(is_above, float("-inf"), x))
    return tl.sum(amount, 0), tl.min(higher, 0), tl.max(lower, 0)


@triton.jit
def _between(low, high):
    """A number from `low` on and below `high`, in their middle."""
    middle = low + (high - low) * 0.5
    return tl.where(middle < high, middle, low)


@triton.jit
def _kth_largest(row, V, top, temperature, k, low, BLOCK: tl.constexpr):
    """The k-th largest x; `low`, the smallest one, where there are fewer, or k is 0."""
    high = tl.where(k > 0, 0.0, low)
    while low < high:
        middle = _between(low, high)
        count, higher, lower = _above(row, V, top, temperature, middle, False, BLOCK)
        high = tl.where(count > k, high, tl.where(count == k, higher, lower))
        low = tl.where(count >= k, higher, low)
    return low


@triton.jit
def _nucleus(row, V, top, temperature, tail, low, BLOCK: tl.constexpr):
    """The smallest x that is kept of those from `low` on, and the last token of it that is not.

    That token is -1 where all of that x are kept.
    """
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        v, x = scaled(row, start, V, top, temperature, BLOCK)
        mass += tl.where(x >= low, tl.exp(x), 0.0).to(tl.float64)
    total = tl.sum(mass, 0)
    removable = tail.to(tl.float64) * total
    high = tl.where(tail > 0.0, 0.0, low)
    while low < high:
        middle = _between(low, high)
        above, higher, lower = _above(row, V, top, temperature, middle, True, BLOCK)
        fits = total - above <= removable  # all that is not above may go
        high = tl.where(fits, high, lower)
        low = tl.where(fits, higher, low)
    last = tl.full((), -1, tl.int32)
    if tail > 0.0:
        above, higher, lower = _above(row, V, top, temperature, low, True, BLOCK)
        equal = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            v, x = scaled(row, start, V, top, temperature, BLOCK)
            equal += (x == low).to(tl.int32)
        count = tl.sum(equal, 0)
        p = tl.exp(low).to(tl.float64)
        rest = removable - (total - above - count * p)
        going = tl.minimum(tl.floor(rest / p), count - 1.0).to(tl.int32)
        seen = tl.full((), 0, tl.int32)
        if going > 0:
            for start in range(0, V, BLOCK):
                v, x = scaled(row, start, V, top, temperature, BLOCK)
                is_equal = (x == low).to(tl.int32)
                place = seen + tl.cumsum(is_equal, 0)
                goes = (is_equal > 0) & (place <= going)
                last = tl.maximum(last, tl.max(tl.where(goes, v, -1), 0))
                seen += tl.sum(is_equal, 0)
    return low, last


@triton.jit
def limit_rows(
    logits, temperatures, top_k, tails, least, last, V, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest x that a row keeps, and the last token of that x that it does not; or -1."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride
    temperature = tl.load(temperatures + r)
    k = tl.load(top_k + r).to(tl.int32)
    tail = tl.load(tails + r)
    kept = tl.full((), float("-inf"), tl.float32)
    gone = tl.full((), -1, tl.int32)
    if (k > 0) | (tail > 0.0):
        top = highest(row, V, BLOCK)
        low = _lowest(row, V, top, temperature, BLOCK)
        low = _kth_largest(row, V, top, temperature, k, low, BLOCK)
        kept, gone = _nucleus(row, V, top, temperature, tail, low, BLOCK)
    tl.store(least + r, kept)
    tl.store(last + r, gone)


def limited(logits: Tensor, limits: TokenLimits) -> tuple[Tensor, Tensor]:
    """The threshold of each row, [R] fp32, and its last token at it that is not kept, [R] int32."""
    rows, vocabulary = logits.shape
    least = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, dtype=torch.int32, device=logits.device)
    block = min(SEARCH_BLOCK, int(triton.next_power_of_2(vocabulary)))
    if rows:
        limit_rows[(rows,)](
            logits, limits.temperatures, limits.top_k, limits.tails, least, last, vocabulary,
            logits.stride(0), BLOCK=block, num_warps=max(1, 32 * block // SEARCH_BLOCK),
        )  # fmt: skip
    return least, last

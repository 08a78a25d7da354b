"""Next tokens from logits: the largest, or a token drawn within limits, without sorts.

    greedy   the first v with l_v = max l
    keep     x_v = (l_v - max l) / temperature of tokens within the row's limits; -inf of others
    draw     p_v = exp x_v; the first v with Σ_{w ≤ v} p_w > u · Σ_w p_w
    top-k    keeps x_v >= c, the k-th largest; of equal ones all
    top-p    removes, from the smallest x on and of equal ones from the first on, tokens whose
             probabilities add up to at most (1 - p) of all that top-k keeps; never the last one

Each is a launch, and a second where rows have top-k or top-p, in place of sorts and of up to
eight launches over fp32 and fp64 copies of [R, V]. Masks and penalties precede; they remove a
token by -inf. Top-k and top-p are a threshold, which is found between two values of the row: a pass
counts, or adds up, what is above the middle of the two, and finds the values next to it, which take
the place of one of the two. It ends when both are the same, after some 10 to 20 passes over a row
that lies in L2.

Shapes: R rows, V vocabulary. Sums are in fp64, in a fixed order.
Grid: a program a row; several programs a row would take a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.kernels.batch import TokenLimits

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
    """Return the smallest x above -inf; 0, the largest, without such x."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        _, x = scaled(row, start, V, top, temperature, BLOCK)
        least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
    lowest = tl.min(least, 0)
    return tl.where(lowest < float("inf"), lowest, 0.0)


@triton.jit
def _above(row, V, top, temperature, middle, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of x above `middle`, or the sum of their p, and its two neighbours.

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
    middle = low + (high - low) * 0.5
    return tl.where(middle < high, middle, low)


@triton.jit
def _kth_largest(row, V, top, temperature, k, low, BLOCK: tl.constexpr):
    """Return the k-th largest x; `low`, the smallest x, if there are fewer or k is 0."""
    high = tl.where(k > 0, 0.0, low)
    while low < high:
        middle = _between(low, high)
        count, higher, lower = _above(row, V, top, temperature, middle, False, BLOCK)
        high = tl.where(count > k, high, tl.where(count == k, higher, lower))
        low = tl.where(count >= k, higher, low)
    return low


@triton.jit
def _nucleus(row, V, top, temperature, tail, low, BLOCK: tl.constexpr):
    """Return the smallest x that is kept of those from `low` on, and the last removed token of it.

    That token is -1 if all of that x are kept.
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
    """Find the smallest x that a row keeps, and the last removed token of that x; or -1."""
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
    """Return the threshold of each row, [R] fp32, and its last removed token there, [R] int32."""
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


GREEDY_BLOCK = 16384
"""Columns at a time: of 1,024 threads each has two loads of 16 bytes in bf16, four in fp32, for a
processor that has a row to itself needs some 32 KiB on the way."""
DRAW_BLOCK = 8192
"""Likewise: two loads of fp32. With more a thread's 64 registers do not hold the sums in fp64."""
THREADS = 1024


@triton.jit
def _load(row, start, V, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    v = start + tl.arange(0, BLOCK)
    return v, tl.load(row + v, v < V, other=float("-inf")).to(WIDE)


@triton.jit
def greedy_rows(logits, tokens, V, stride, BLOCK: tl.constexpr):
    """Find the index of the largest logit of a row, the first of equal ones. NaN counts as +inf."""
    is_double: tl.constexpr = logits.dtype.element_ty == tl.float64
    WIDE: tl.constexpr = tl.float64 if is_double else tl.float32
    row = logits + tl.program_id(0).to(tl.int64) * stride
    best = tl.full((), float("-inf"), WIDE)
    place = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        v, value = _load(row, start, V, WIDE, BLOCK)
        value = tl.where(value == value, value, float("inf"))
        highest = tl.max(value, 0)
        first = tl.min(tl.where(value == highest, v, V), 0)
        place = tl.where(highest > best, first, place)
        best = tl.maximum(best, highest)
    tl.store(tokens + tl.program_id(0), place.to(tl.int64))


@triton.jit
def _is_cut(v, x, least, last):
    """True for tokens that top-k and top-p remove; not for NaN, so that a row's sum is NaN."""
    return (x < least) | ((x == least) & (v <= last))


@triton.jit
def _row_limits(leasts, lasts, r, LIMITED: tl.constexpr):
    least = 0.0
    last = 0
    if LIMITED:
        least = tl.load(leasts + r)
        last = tl.load(lasts + r)
    return least, last


@triton.jit
def keep_rows(
    logits, temperatures, min_ps, leasts, lasts, out, V, stride,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x of a row's tokens."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * stride
    temperature = tl.load(temperatures + r)
    min_p = tl.load(min_ps + r)
    least, last = _row_limits(leasts, lasts, r, LIMITED)
    top = highest(row, V, BLOCK)
    for start in range(0, V, BLOCK):
        v, x = scaled(row, start, V, top, temperature, BLOCK)
        kept = tl.where(tl.exp(x) < min_p, float("-inf"), x)
        if LIMITED:
            kept = tl.where(_is_cut(v, x, least, last), float("-inf"), kept)
        tl.store(out + r * V + v, kept, v < V)


@triton.jit
def _probabilities(
    row, start, V, top, temperature, least, last, min_p, LIMITED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return p of a block, up to a factor of the row; 0 of tokens beyond the limits."""
    v, x = scaled(row, start, V, top, temperature, BLOCK)
    p = tl.exp(x)
    if LIMITED:
        p = tl.where(_is_cut(v, x, least, last), 0.0, p)
    return v, tl.where(p < min_p, 0.0, p).to(tl.float64)


@triton.jit
def draw_rows(
    logits, temperatures, min_ps, leasts, lasts, uniform, tokens, are_drawn, V, stride,
    LIMITED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token of a row; 0 and false if the sum is no number, or 0.

    The maximum; each block's sum; the block in which the sums pass the point; the token in it.
    """
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride
    temperature = tl.load(temperatures + r)
    min_p = tl.load(min_ps + r)
    least, last = _row_limits(leasts, lasts, r, LIMITED)
    top = highest(row, V, BLOCK)
    block = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    for start in range(0, V, BLOCK):
        _, p = _probabilities(row, start, V, top, temperature, least, last, min_p, LIMITED, BLOCK)
        sums = tl.where(block == start // BLOCK, tl.sum(p, 0), sums)
    total = tl.sum(sums, 0)
    point = tl.load(uniform + r) * total
    before = tl.cumsum(sums, 0) - sums
    chosen = tl.max(tl.where((before <= point) & (sums > 0.0), block, 0), 0)
    passed = tl.sum(tl.where(block == chosen, before, 0.0), 0)
    start = chosen * BLOCK
    v, p = _probabilities(row, start, V, top, temperature, least, last, min_p, LIMITED, BLOCK)
    token = tl.min(tl.where((passed + tl.cumsum(p, 0) > point) & (p > 0.0), v, V), 0)
    # Rounding can put the point behind the block's last token that has a probability.
    final = tl.max(tl.where(p > 0.0, v, 0), 0)
    is_drawn = (total > 0.0) & (total < float("inf"))
    tl.store(tokens + r, tl.where(is_drawn, tl.minimum(token, final), 0).to(tl.int64))
    tl.store(are_drawn + r, is_drawn)


def greedy(logits: Tensor) -> Tensor:
    """Return each row's most likely token: [R, V] to [R], int64; of equal ones the first."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        options = _options(GREEDY_BLOCK, vocabulary)
        greedy_rows[(rows,)](logits, tokens, vocabulary, logits.stride(0), **options)
    return tokens


def keep(logits: Tensor, limits: TokenLimits) -> Tensor:
    """Return the logits of tokens within each row's limits, less its largest, over its temperature.

    Args:
        logits: [R, V], rows contiguous; computed in fp32.
    Returns:
        [R, V], fp32; -inf for tokens beyond the limits.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    least, last = limited(logits, limits) if limits.is_cut else (None, None)
    if rows:
        keep_rows[(rows,)](
            logits, limits.temperatures, limits.min_p, least, last, out, vocabulary,
            logits.stride(0), LIMITED=limits.is_cut, **_options(DRAW_BLOCK, vocabulary),
        )  # fmt: skip
    return out


def draw(logits: Tensor, limits: TokenLimits, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, at its number u of the cumulative distribution.

    Args:
        logits: [R, V], rows contiguous; computed in fp32.
        uniform: u, [R], fp64, at least 0 and less than 1.
    Returns:
        Tokens [R], int64, and a mask [R]; false, and the token 0, where the logits hold NaN or no
            finite
        number.
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    are_drawn = torch.empty(rows, dtype=torch.bool, device=logits.device)
    least, last = limited(logits, limits) if limits.is_cut else (None, None)
    if rows:
        options = _options(DRAW_BLOCK, vocabulary)
        blocks = triton.cdiv(vocabulary, options["BLOCK"])
        draw_rows[(rows,)](
            logits, limits.temperatures, limits.min_p, least, last, uniform, tokens, are_drawn,
            vocabulary, logits.stride(0), LIMITED=limits.is_cut,
            BLOCKS=max(2, triton.next_power_of_2(blocks)), **options,
        )  # fmt: skip
    return tokens, are_drawn


def _options(most: int, vocabulary: int) -> dict[str, int]:
    """Return the columns of a block, all of a narrow row, and its warps."""
    block = min(most, int(triton.next_power_of_2(vocabulary)))
    return {"BLOCK": block, "num_warps": max(1, THREADS * block // (32 * most))}

"""What forward and backward of paged attention have in common: places of keys, and scores.

Scores are in units of ln 2, so that weights are exp2 of them:

    s = scale · q kᵀ;  s = softcap · tanh(s / softcap);  s += slope · (j - i);  s / ln 2

for the token at position i that sees the key at position j. tanh x = 1 - 2 / (exp 2x + 1).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)
"""Maximum of no scores: finite, so that differences of two of them are, too."""


@triton.jit
def places(
    table,
    start,
    j,
    inside,
    page_stride,
    token_stride,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Distances of a sequence's tokens j from its head's first element, [BLOCK], int64."""
    if PAGED:
        page = tl.load(table + j // PAGE, inside, 0).to(tl.int64)
        place = page * page_stride + (j % PAGE) * token_stride
    else:
        place = (start + j).to(tl.int64) * token_stride
    return place


@triton.jit
def bounded(products, scale, SOFTCAP: tl.constexpr):
    """Scores but for ALiBi, and how they grow with `scale · products`, where they are capped."""
    if SOFTCAP > 0.0:
        tanh = 1.0 - 2.0 / (tl.exp2(products * (scale * (2.0 * LOG2E / SOFTCAP))) + 1.0)
        scores = tanh * (SOFTCAP * LOG2E)
        growth = 1.0 - tanh * tanh
    else:
        scores = products * (scale * LOG2E)
        growth = 1.0
    return scores, growth


@triton.jit
def seen(i, j, WINDOW: tl.constexpr):
    """Whether the token at position i sees the key at j."""
    visible = j <= i
    if WINDOW > 0:
        visible = visible & (j > i - WINDOW)
    return visible

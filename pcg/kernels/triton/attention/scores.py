"""Device functions of attention's forward and backward kernels: rows, keys and their scores.

Scores are in units of ln 2, so that weights are exp2 of them:

    s = scale · q kᵀ;  s = softcap · tanh(s / softcap);  s += slope · (j - i);  s / ln 2

for the token at position i that sees the key at position j. tanh x = 1 - 2 / (exp 2x + 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)
"""Maximum of no scores: finite, so that differences of two of them are, too."""


@triton.jit
def piece(items, ITEM: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the part, first and end of the program's BLOCK of an item's ITEM rows or keys."""
    cuts: tl.constexpr = ITEM // BLOCK
    item = items + tl.program_id(0) // cuts * COLUMNS
    first = tl.load(item + 1)
    end = first + tl.load(item + 2)
    first += tl.program_id(0) % cuts * BLOCK
    return tl.load(item), first, tl.minimum(first + BLOCK, end)


@triton.jit
def part_of(parts, number, COLUMNS: tl.constexpr):
    """Return start, length and context of a part."""
    part = parts + number * COLUMNS
    return tl.load(part), tl.load(part + 1), tl.load(part + 2)


@triton.jit
def tile_rows(first, end, start, context, kv_head, G: tl.constexpr, BLOCK: tl.constexpr):
    """Return a mask of the BLOCK rows from `first`, and the position, head and token of each.

    Rows from `end` on repeat the last row.
    """
    r = first + tl.arange(0, BLOCK)
    real = r < end
    r = tl.minimum(r, end - 1)
    return real, context + r // G, kv_head * G + r % G, (start + r // G).to(tl.int64)


@triton.jit
def first_seen(i, REACH: tl.constexpr):
    """Return the position of the first key that the token at i sees.

    REACH is 0 for all keys, positive for a window, and negative for the size of a chunk.
    """
    first = i * 0
    if REACH > 0:
        first = tl.maximum(i + 1 - REACH, 0)
    elif REACH < 0:
        first = i // -REACH * -REACH
    return first


@triton.jit
def end_seeing(j, REACH: tl.constexpr):
    """Return the position behind the last token that sees the key at j, if REACH is not 0."""
    end = j + REACH
    if REACH < 0:
        end = (j // -REACH + 1) * -REACH
    return end


@triton.jit
def tile_keys(first, end, context, G: tl.constexpr, BLOCK: tl.constexpr, REACH: tl.constexpr):
    """Return the keys of a tile of rows, in blocks: begin, full, edge and end.

    From `begin` on some row sees some key; all rows see all keys from `full` to `edge`.
    """
    begin = 0
    full = 0
    edge = (context + first // G + 1) // BLOCK * BLOCK
    stop = context + (end - 1) // G + 1
    if REACH != 0:
        begin = first_seen(context + first // G, REACH) // BLOCK * BLOCK
        full = tl.cdiv(first_seen(stop - 1, REACH), BLOCK) * BLOCK
        edge = tl.maximum(edge, begin)
        full = tl.minimum(full, edge)
    return begin, full, edge, stop


@triton.jit
def located(
    base, table, start, first, n, inside, page_stride, token_stride,
    PAGED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return a pointer, and the distances from it of a sequence's tokens first + n, [BLOCK].

    `base` points to the head of the first token of all. `first` is a multiple of PAGE, so that
    terms of only n are known before a loop over blocks; without a mask they are kept in registers.
    """
    if PAGED:
        entry = table + (first + n) // PAGE
        if inside is None:
            page = tl.load(entry)
            row = n % PAGE
        else:
            page = tl.load(entry, inside, 0)
            row = (first + n) % PAGE
        page = page.to(tl.uint32, bitcast=True).to(tl.uint64)
        place = page * page_stride.to(tl.uint32).to(tl.uint64) + row * token_stride
    else:
        base += (start + first).to(tl.int64) * token_stride
        place = n * token_stride
    return base, place


@triton.jit
def load_rows(base, place, present, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of SIZE elements at some distances, [rows, BLOCK]; 0 for rows not present."""
    d = tl.arange(0, BLOCK)
    inside = (d < SIZE)[None, :]
    if present is not None:
        inside = present[:, None] & inside
    return tl.load(base + place[:, None] + d[None, :], inside, 0.0)


@triton.jit
def bounded(products, scale, SOFTCAP: tl.constexpr):
    """Return scores without ALiBi, and their growth with `scale · products` if they are capped."""
    if SOFTCAP > 0.0:
        tanh = 1.0 - 2.0 / (tl.exp2(products * (scale * (2.0 * LOG2E / SOFTCAP))) + 1.0)
        scores = tanh * (SOFTCAP * LOG2E)
        growth = 1.0 - tanh * tanh
    else:
        scores = products * (scale * LOG2E)
        growth = 1.0
    return scores, growth


@triton.jit
def seen(i, j, REACH: tl.constexpr):
    """Return whether the token at position i sees the key at j."""
    visible = j <= i
    if REACH != 0:
        visible = visible & (j >= first_seen(i, REACH))
    return visible

"""Attention over a token-flat batch with keys and values in pages: the kernels.

    s = scale · q kᵀ, capped and with ALiBi (`scores`);  m = max s;  l = Σ exp(s - m)
    out = Σ exp(s - m) v / l;  lse = m + ln l

A sink is a key of a given score with value 0: with it m and l start. Blocks of keys follow in
order, and m, l and the sum of values are rescaled as m grows (online softmax).

Hopper's tensor cores work parallel to the other units, if they get work early enough. With AHEAD
the products of a block's keys are requested before the block ahead of it has its weights:

    max s of block n             while p v of block n - 1 is computed
    exp(s - m) of block n        while q kᵀ of block n + 1 is computed, too
    wait for both, then ask for p v of block n

    attend_tiles     prefill chunks and windows: a tile of rows against all keys that they see.
                     Grid: tiles (cut to BLOCK_M rows), KV heads.
    attend_splits    decoding: the heads of a group against a split of the keys; m, l and the sum
                     go to a workspace in fp32. Grid: splits, KV heads, blocks of the group.
    reduce_splits    the splits of a token in their order. Grid: decoding tokens, heads.

The heads of a group are further rows of the tokens (`work`), so that keys and values are read once
for all of them.

Shapes: T tokens, H heads, K KV heads, G = H / K, D head size, Dv that of values.
Source: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding; pages from vLLM (arXiv 2309.06180).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pcg.kernels.triton.attention.scores import (
    LN2,
    LOG2E,
    LOWEST,
    bounded,
    first_seen,
    load_rows,
    located,
    part_of,
    piece,
    seen,
    tile_keys,
    tile_rows,
)


@triton.jit
def key_products(
    query, first, last, table, start, keys, key_page, key_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return q kᵀ of keys from `first`, [rows, BLOCK_N], in fp32; if MASKED, 0 from `last` on."""
    n = tl.arange(0, BLOCK_N)
    present = None
    if MASKED:
        present = first + n < last
    at, place = located(keys, table, start, first, n, present, key_page, key_token, PAGED, PAGE)
    key = load_rows(at, place, present, D, BLOCK_D)
    return tl.dot(query, tl.trans(key), input_precision="ieee")


@triton.jit
def attend_blocks(
    total, m, norm, products, query, i, slope, begin, end, last, table, start, keys, values,
    key_page, key_token, value_page, value_token, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend to blocks of keys from `begin` to `end`; `last` is the end of the existing keys.

    Without MASKED all rows see all keys of these blocks, and with AHEAD of the next one. Then
    `products` are q kᵀ of the block at `begin`, and those of the block at `end` are returned.
    """
    n = tl.arange(0, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        present = None
        if MASKED:
            present = first + n < last
        if AHEAD:
            scores = products
        else:
            scores = key_products(
                query, first, last, table, start, keys, key_page, key_token, D, BLOCK_D, BLOCK_N,
                PAGED, PAGE, MASKED,
            )  # fmt: skip
        unit = scale * LOG2E  # the highest of plain scores is that of their products
        if (SOFTCAP > 0.0) | ALIBI:
            scores, _ = bounded(scores, scale, SOFTCAP)
            unit = 1.0
        if ALIBI:
            scores += slope[:, None] * (first + n[None, :] - i[:, None]).to(tl.float32)
        if MASKED:
            visible = (first + n < last)[None, :] & seen(i[:, None], first + n[None, :], REACH)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(m, tl.max(scores, 1) * unit)
        weights = tl.exp2(scores * unit - higher[:, None])
        shrunk = tl.exp2(m - higher)
        m = higher
        norm = norm * shrunk + tl.sum(weights, 1)
        if AHEAD:
            products = key_products(
                query, first + BLOCK_N, last, table, start, keys, key_page, key_token, D, BLOCK_D,
                BLOCK_N, PAGED, PAGE, MASKED,
            )  # fmt: skip
        at, place = located(
            values, table, start, first, n, present, value_page, value_token, PAGED, PAGE
        )
        value = load_rows(at, place, present, DV, BLOCK_DV)
        total = tl.dot(
            weights.to(value.dtype), value, total * shrunk[:, None], input_precision="ieee"
        )
    return total, m, norm, products


@triton.jit
def attend_tiles(
    q, keys, values, out, lse, alibi, sinks, parts, pages, tiles, q_token, q_head,
    key_page, key_head, key_token, value_page, value_head, value_token, table_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of BLOCK_M rows of a part."""
    number, first_row, end_row = piece(tiles, TILE, BLOCK_M, COLUMNS)
    if first_row >= end_row:
        return
    kv_head = tl.program_id(1)
    start, length, context = part_of(parts, number, COLUMNS)

    real, i, head, token = tile_rows(first_row, end_row, start, context, kv_head, G, BLOCK_M)
    query = load_rows(q, token * q_token + head * q_head, None, D, BLOCK_D)
    slope = i.to(tl.float32)
    if ALIBI:
        slope = tl.load(alibi + head).to(tl.float32) * LOG2E
    m = tl.full((BLOCK_M,), LOWEST, tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        m = tl.load(sinks + head).to(tl.float32) * LOG2E
        norm = norm + 1.0
    total = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    keys += kv_head.to(tl.int64) * key_head
    values += kv_head.to(tl.int64) * value_head
    table = pages + number * table_width
    last = context + length
    begin, full, edge, end = tile_keys(first_row, end_row, context, G, BLOCK_N, REACH)
    products = m
    if AHEAD:
        edge = tl.maximum(edge - BLOCK_N, full)  # so that the block ahead has no masks, either
        products = key_products(
            query, begin, last, table, start, keys, key_page, key_token, D, BLOCK_D, BLOCK_N,
            PAGED, PAGE, True,
        )  # fmt: skip
    if REACH != 0:
        total, m, norm, products = attend_blocks(
            total, m, norm, products, query, i, slope, begin, full, last, table, start, keys,
            values, key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D, BLOCK_DV,
            BLOCK_N, REACH, SOFTCAP, ALIBI, PAGED, PAGE, True, AHEAD,
        )  # fmt: skip
    total, m, norm, products = attend_blocks(
        total, m, norm, products, query, i, slope, full, edge, last, table, start, keys, values,
        key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_N, REACH, SOFTCAP, ALIBI, PAGED, PAGE, False, AHEAD,
    )  # fmt: skip
    total, m, norm, products = attend_blocks(
        total, m, norm, products, query, i, slope, edge, end, last, table, start, keys, values,
        key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_N, REACH, SOFTCAP, ALIBI, PAGED, PAGE, True, AHEAD,
    )  # fmt: skip

    dv = tl.arange(0, BLOCK_DV)
    row = token * H + head
    inside = real[:, None] & (dv < DV)[None, :]
    result = (total / norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * DV + dv[None, :], result, inside)
    if LSE:
        tl.store(lse + row, (m + tl.log2(norm)) * LN2, real)


@triton.jit
def used_splits(count, context, REACH: tl.constexpr, SPLIT: tl.constexpr):
    """Return the number of a decoding token's first splits that have keys it sees."""
    if REACH != 0:
        count = tl.minimum(count, tl.cdiv(context + 1 - first_seen(context, REACH), SPLIT))
    return count


@triton.jit
def attend_splits(
    q, keys, values, totals, highest, sums, out, lse, alibi, sinks, parts, pages, splits, q_token,
    q_head, key_page, key_head, key_token, value_page, value_head, value_token, table_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute m, l and the sum of values of a decoding token's heads over a split of its keys.

    If the token has a single split, compute out and lse, by the steps of `reduce_splits`.
    """
    item = tl.program_id(0)
    split = splits + item * COLUMNS
    number = tl.load(split)
    which = tl.load(split + 1)
    start, _, context = part_of(parts, number, COLUMNS)
    count = used_splits(tl.load(split + 2), context, REACH, SPLIT)
    if which >= count:
        return
    kv_head = tl.program_id(1)

    g = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = g < G
    head = kv_head * G + tl.minimum(g, G - 1)
    query = load_rows(q, start.to(tl.int64) * q_token + head * q_head, None, D, BLOCK_D)
    i = context + tl.zeros((BLOCK_H,), tl.int32)
    slope = i.to(tl.float32)
    if ALIBI:
        slope = tl.load(alibi + head).to(tl.float32) * LOG2E

    last = context + 1
    low = 0
    if REACH != 0:
        low = first_seen(context, REACH) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(last - low, BLOCK_N), count) * BLOCK_N
    begin = low + which * share
    end = tl.minimum(begin + share, last)
    m = tl.full((BLOCK_H,), LOWEST, tl.float32)
    norm = tl.zeros((BLOCK_H,), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_DV), tl.float32)
    keys += kv_head.to(tl.int64) * key_head
    values += kv_head.to(tl.int64) * value_head
    total, m, norm, _ = attend_blocks(
        total, m, norm, m, query, i, slope, begin, end, last, pages + number * table_width, start,
        keys, values, key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D,
        BLOCK_DV, BLOCK_N, REACH, SOFTCAP, ALIBI, True, PAGE, True, False,
    )  # fmt: skip

    dv = tl.arange(0, BLOCK_DV)
    inside = real[:, None] & (dv < DV)[None, :]
    if count == 1:
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            higher = tl.maximum(m, sink)
            shrunk = tl.exp2(m - higher)
            norm = norm * shrunk + tl.exp2(sink - higher)
            total = total * shrunk[:, None]
            m = higher
        row = start.to(tl.int64) * H + head
        result = (total / norm[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * DV + dv[None, :], result, inside)
        if LSE:
            tl.store(lse + row, (m + tl.log2(norm)) * LN2, real)
    else:
        row = item.to(tl.int64) * H + head
        tl.store(totals + row[:, None] * DV + dv[None, :], total, inside)
        tl.store(highest + row, m, real)
        tl.store(sums + row, norm, real)


@triton.jit
def reduce_splits(
    totals, highest, sums, out, lse, sinks, parts, decodes,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr, REACH: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a head of a decoding token that has several splits."""
    decode = decodes + tl.program_id(0) * COLUMNS
    count = tl.load(decode + 2)
    number = tl.load(decode)
    count = used_splits(count, tl.load(parts + number * COLUMNS + 2), REACH, SPLIT)
    if count <= 1:
        return
    head = tl.program_id(1)
    first_split = tl.load(decode + 1)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full((), LOWEST, tl.float32)
    norm = tl.full((), 0.0, tl.float32)
    if SINKS:
        m = tl.load(sinks + head).to(tl.float32) * LOG2E
        norm = norm + 1.0
    total = tl.zeros((BLOCK_DV,), tl.float32)
    for first in range(0, count, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        present = s < count
        row = (first_split + s).to(tl.int64) * H + head
        high = tl.load(highest + row, present, LOWEST)
        part = load_rows(totals, row * DV, present, DV, BLOCK_DV)
        higher = tl.maximum(m, tl.max(high, 0))
        weights = tl.exp2(high - higher)
        shrunk = tl.exp2(m - higher)
        m = higher
        norm = norm * shrunk + tl.sum(weights * tl.load(sums + row, present, 0.0), 0)
        total = total * shrunk + tl.sum(weights[:, None] * part, 0)
    row = tl.load(parts + number * COLUMNS).to(tl.int64) * H + head
    tl.store(out + row * DV + dv, (total / norm).to(out.dtype.element_ty), dv < DV)
    if LSE:
        tl.store(lse + row, (m + tl.log2(norm)) * LN2)

"""The kernels of paged attention's gradients, of windows in the cache and of whole sequences.

    p = exp(s - lse);  delta = rowsum(dout · out);  ds = p (dout vᵀ - delta) (1 - tanh²)
    dq = scale · ds k;  dk = scale · dsᵀ q;  dv = pᵀ dout

with s as in forward (`scores`), tanh that of a soft cap. Sinks are in lse, are frozen, and get no
gradient.

    delta_rows         delta of every token and head. Grid: blocks of these.
    query_gradients    dq of a tile of rows, over the keys that they see. Grid: tiles, KV heads.
    key_gradients      dk and dv of a block of keys, over the rows that see them: tokens in order,
                       and of each the heads of the group. Grid: key blocks, KV heads.

Only one program writes each element, in a fixed order: the same bits every time. With a cache, a
window adds its gradients to the sums of the pass over all keys that it saw; those of its own tokens
are final then, and are written in q's dtype, too (FlexLLM v2 §6.1). Windows run from the last.

Shapes: T tokens, H heads, K KV heads, G = H / K, D head size, Dv that of values.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2, as two kernels instead of atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pcg.kernels.triton.attention.scores import (
    LOG2E,
    bounded,
    end_seeing,
    load_rows,
    located,
    part_of,
    piece,
    seen,
    tile_keys,
    tile_rows,
)

PIECE: tl.constexpr = tl.constexpr(16)
"""Elements of a head that a product of fp32 takes at once, where all are too many for registers."""


@triton.jit(do_not_specialize=["count"])
def delta_rows(
    dout, out, delta, count, dout_token, dout_head, out_token, out_head,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout · out), [T, H], in fp32."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = (row // H).to(tl.int64)
    head = row % H
    x = load_rows(dout, token * dout_token + head * dout_head, row < count, DV, BLOCK_DV)
    y = load_rows(out, token * out_token + head * out_head, row < count, DV, BLOCK_DV)
    tl.store(delta + row, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1), row < count)


@triton.jit
def row_products(x, y, SIZE: tl.constexpr):
    """Return x yᵀ, of rows of SIZE elements."""
    if (x.dtype == tl.float32) & (SIZE > 128):
        pieces: tl.constexpr = SIZE // PIECE
        left = tl.trans(tl.reshape(x, (x.shape[0], pieces, PIECE)), (1, 0, 2))
        right = tl.trans(tl.reshape(y, (y.shape[0], pieces, PIECE)), (1, 2, 0))
        return tl.sum(tl.dot(left, right, input_precision="ieee"), 0)
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def add_keys(
    total, query, upstream, logsum, inner, i, slope, begin, end, last, table, start, keys, values,
    key_page, key_token, value_page, value_token, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return total + ds k over blocks of keys from `begin` to `end`; `last` ends all keys."""
    n = tl.arange(0, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        present = None
        if MASKED:
            present = first + n < last
        at, place = located(keys, table, start, first, n, present, key_page, key_token, PAGED, PAGE)
        key = load_rows(at, place, present, D, BLOCK_D)
        scores, growth = bounded(row_products(query, key, BLOCK_D), scale, SOFTCAP)
        if ALIBI:
            scores += slope[:, None] * (first + n[None, :] - i[:, None]).to(tl.float32)
        weights = tl.exp2(scores - logsum[:, None])
        if MASKED:
            visible = (first + n < last)[None, :] & seen(i[:, None], first + n[None, :], REACH)
            weights = tl.where(visible, weights, 0.0)
        at, place = located(
            values, table, start, first, n, present, value_page, value_token, PAGED, PAGE
        )
        value = load_rows(at, place, present, DV, BLOCK_DV)
        weighted = row_products(upstream, value, BLOCK_DV)
        dscores = weights * (weighted - inner[:, None]) * growth
        total = tl.dot(dscores.to(key.dtype), key, total, input_precision="ieee")
    return total


@triton.jit
def query_gradients(
    q, keys, values, dout, lse, delta, dq, alibi, parts, pages, tiles,
    q_token, q_head, dout_token, dout_head,
    key_page, key_head, key_token, value_page, value_head, value_token, table_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK_M rows of a part."""
    number, first_row, end_row = piece(tiles, TILE, BLOCK_M, COLUMNS)
    if first_row >= end_row:
        return
    kv_head = tl.program_id(1)
    start, length, context = part_of(parts, number, COLUMNS)

    real, i, head, token = tile_rows(first_row, end_row, start, context, kv_head, G, BLOCK_M)
    row = token * H + head
    query = load_rows(q, token * q_token + head * q_head, None, D, BLOCK_D)
    upstream = load_rows(dout, token * dout_token + head * dout_head, None, DV, BLOCK_DV)
    logsum = tl.load(lse + row) * LOG2E
    inner = tl.load(delta + row)
    slope = inner
    if ALIBI:
        slope = tl.load(alibi + head).to(tl.float32) * LOG2E
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    keys += kv_head.to(tl.int64) * key_head
    values += kv_head.to(tl.int64) * value_head
    table = pages + number * table_width
    last = context + length
    begin, full, edge, end = tile_keys(first_row, end_row, context, G, BLOCK_N, REACH)
    if REACH != 0:
        total = add_keys(
            total, query, upstream, logsum, inner, i, slope, begin, full, last, table, start,
            keys, values, key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D,
            BLOCK_DV, BLOCK_N, REACH, SOFTCAP, ALIBI, PAGED, PAGE, MASKED=True,
        )  # fmt: skip
    total = add_keys(
        total, query, upstream, logsum, inner, i, slope, full, edge, last, table, start,
        keys, values, key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D,
        BLOCK_DV, BLOCK_N, REACH, SOFTCAP, ALIBI, PAGED, PAGE, MASKED=False,
    )  # fmt: skip
    total = add_keys(
        total, query, upstream, logsum, inner, i, slope, edge, end, last, table, start,
        keys, values, key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D,
        BLOCK_DV, BLOCK_N, REACH, SOFTCAP, ALIBI, PAGED, PAGE, MASKED=True,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    gradients = (total * scale).to(dq.dtype.element_ty)
    tl.store(dq + (row * D)[:, None] + d[None, :], gradients, real[:, None] & (d < D)[None, :])


@triton.jit
def add_rows(
    dkey, dvalue, key, value, j, q, dout, lse, delta, alibi, begin, end, end_row, start, context,
    head, q_token, q_head, dout_token, dout_head, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, REACH: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dkey += dsᵀ q and dvalue += pᵀ dout over rows from `begin` to `end`.

    Rows from `end_row` on are none: q and dout are 0 there. `head` is the group's first.
    """
    for first in range(begin, end, BLOCK_M):
        r = first + tl.arange(0, BLOCK_M)
        real = r < end_row
        i = context + r // G
        token = (start + r // G).to(tl.int64)
        which = head + r % G
        row = token * H + which
        query = load_rows(q, token * q_token + which * q_head, real, D, BLOCK_D)
        products = tl.dot(key, tl.trans(query), input_precision="ieee")
        scores, growth = bounded(products, scale, SOFTCAP)
        if ALIBI:
            slope = tl.load(alibi + which).to(tl.float32) * LOG2E
            scores += slope[None, :] * (j[:, None] - i[None, :]).to(tl.float32)
        logsum = tl.load(lse + row, real, 0.0) * LOG2E
        weights = tl.exp2(scores - logsum[None, :])
        if MASKED:
            weights = tl.where(real[None, :] & seen(i[None, :], j[:, None], REACH), weights, 0.0)
        place = token * dout_token + which * dout_head
        upstream = load_rows(dout, place, real, DV, BLOCK_DV)
        dvalue = tl.dot(weights.to(upstream.dtype), upstream, dvalue, input_precision="ieee")
        weighted = tl.dot(value, tl.trans(upstream), input_precision="ieee")
        inner = tl.load(delta + row, real, 0.0)
        dscores = weights * (weighted - inner[None, :]) * growth
        dkey = tl.dot(dscores.to(query.dtype), query, dkey, input_precision="ieee")
    return dkey, dvalue


@triton.jit
def store_rows(
    out, sums, gradients, of_batch, of_pass, present, in_batch,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write gradients of the batch's tokens; with a cache all are added to the pass's sums."""
    e = tl.arange(0, BLOCK)
    inside = present[:, None] & (e < SIZE)[None, :]
    if PAGED:
        at = sums + (of_pass * SIZE)[:, None] + e[None, :]
        gradients += tl.load(at, inside, 0.0)
        tl.store(at, gradients, inside)
    at = out + (of_batch * SIZE)[:, None] + e[None, :]
    tl.store(at, gradients.to(out.dtype.element_ty), inside & in_batch[:, None])


@triton.jit
def key_gradients(
    q, keys, values, dout, lse, delta, dk, dv, keys_sum, values_sum, alibi, parts, pages,
    key_blocks, q_token, q_head, dout_token, dout_head,
    key_page, key_head, key_token, value_page, value_head, value_token, table_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK_N keys that a part saw; with a cache they go to the sums."""
    number, first_key, end_key = piece(key_blocks, TILE, BLOCK_N, COLUMNS)
    if first_key >= end_key:
        return
    kv_head = tl.program_id(1)
    start, length, context = part_of(parts, number, COLUMNS)
    origin = tl.load(parts + number * COLUMNS + 3)

    begin = tl.maximum(first_key - context, 0) * G
    end_row = length * G
    if REACH != 0:
        end_row = tl.minimum(length, tl.maximum(end_seeing(end_key - 1, REACH) - context, 0)) * G
    if begin >= end_row:
        return

    n = tl.arange(0, BLOCK_N)
    j = first_key + n
    present = j < end_key
    table = pages + number * table_width
    head = kv_head.to(tl.int64)
    at, place = located(
        keys + head * key_head,
        table,
        start,
        first_key,
        n,
        present,
        key_page,
        key_token,
        PAGED,
        PAGE,
    )
    key = load_rows(at, place, present, D, BLOCK_D)
    at, place = located(
        values + head * value_head, table, start, first_key, n, present, value_page, value_token,
        PAGED, PAGE,
    )  # fmt: skip
    value = load_rows(at, place, present, DV, BLOCK_DV)
    dkey = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # Rows from `edge` to `full` see all keys of the block.
    edge = tl.maximum(first_key + BLOCK_N - 1 - context, 0) * G
    edge = tl.minimum(begin + tl.cdiv(edge - begin, BLOCK_M) * BLOCK_M, end_row)
    full = end_row
    if REACH != 0:
        full = tl.maximum(end_seeing(first_key, REACH) - context, 0) * G
        full = edge + tl.maximum(tl.minimum(full, end_row) - edge, 0) // BLOCK_M * BLOCK_M
    dkey, dvalue = add_rows(
        dkey, dvalue, key, value, j, q, dout, lse, delta, alibi, begin, edge, end_row, start,
        context, kv_head * G, q_token, q_head, dout_token, dout_head, scale, H, G, D, DV, BLOCK_D,
        BLOCK_DV, BLOCK_M, REACH, SOFTCAP, ALIBI, MASKED=True,
    )  # fmt: skip
    dkey, dvalue = add_rows(
        dkey, dvalue, key, value, j, q, dout, lse, delta, alibi, edge, full, end_row, start,
        context, kv_head * G, q_token, q_head, dout_token, dout_head, scale, H, G, D, DV, BLOCK_D,
        BLOCK_DV, BLOCK_M, REACH, SOFTCAP, ALIBI, MASKED=False,
    )  # fmt: skip
    if REACH != 0:
        dkey, dvalue = add_rows(
            dkey, dvalue, key, value, j, q, dout, lse, delta, alibi, full, end_row, end_row,
            start, context, kv_head * G, q_token, q_head, dout_token, dout_head, scale, H, G, D, DV,
            BLOCK_D, BLOCK_DV, BLOCK_M, REACH, SOFTCAP, ALIBI, MASKED=True,
        )  # fmt: skip

    heads: tl.constexpr = H // G
    of_pass = (origin + j).to(tl.int64) * heads + kv_head
    of_batch = (start + j - context).to(tl.int64) * heads + kv_head
    in_batch = j >= context
    store_rows(dk, keys_sum, dkey * scale, of_batch, of_pass, present, in_batch, D, BLOCK_D, PAGED)
    store_rows(dv, values_sum, dvalue, of_batch, of_pass, present, in_batch, DV, BLOCK_DV, PAGED)

"""Attention over a token-flat batch whose keys and values lie in pages.

    s = scale · q kᵀ, capped and with ALiBi (attention_scores.py);  m = max s;  l = Σ exp(s - m)
    out = Σ exp(s - m) v / l;  lse = m + ln l

A sink is a key of a given score whose value is 0: with it m and l start. Blocks of keys come in
order, and m, l and the sum of values are rescaled as m grows (online softmax).

    attend_tiles     prefill chunks and windows: a tile of rows against all keys that they see.
                     Grid: tiles (cut to BLOCK_M rows), KV heads.
    attend_splits    decoding: the heads of a group against a split of the keys; m, l and the sum
                     go to a workspace in fp32. Grid: splits, KV heads, blocks of the group.
    reduce_splits    the splits of a token in their order. Grid: decoding tokens, heads.

The heads of a group are rows beside the tokens (attention_work.py), so that keys and values are
read once for all of them. (A long file, as Triton's kernels name every stride.)

Shapes: T tokens, H heads, K KV heads, G = H / K, D head size, Dv that of values.
Source: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding; pages from vLLM (arXiv 2309.06180).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.sizes import HEAD_SIZES, PAGE_TOKENS
from pcg.kernels.triton.attention.cache_rows import CacheRows
from pcg.kernels.triton.attention.scores import LN2, LOG2E, LOWEST, bounded, places, seen
from pcg.kernels.triton.attention.work import SPLIT_KEYS, TILE_ROWS, AttentionWork


@triton.jit
def attend_blocks(
    total,
    m,
    norm,
    query,
    i,
    slope,
    begin,
    end,
    last,
    table,
    start,
    keys,
    values,
    key_page,
    key_token,
    value_page,
    value_token,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Go on with blocks of keys from `begin` to `end`; `last` is the end of the keys there are.

    Without MASKED all rows see all keys of these blocks.
    """
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for first in range(begin, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        there = j < last
        place = places(table, start, j, there, key_page, key_token, PAGED, PAGE)
        inside = there[:, None] & (d < D)[None, :]
        key = tl.load(keys + place[:, None] + d[None, :], inside, 0.0)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores, _ = bounded(products, scale, SOFTCAP)
        if ALIBI:
            scores += slope[:, None] * (j[None, :] - i[:, None]).to(tl.float32)
        if MASKED:
            visible = there[None, :] & seen(i[:, None], j[None, :], WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(m - higher)
        m = higher
        norm = norm * shrunk + tl.sum(weights, 1)
        place = places(table, start, j, there, value_page, value_token, PAGED, PAGE)
        inside = there[:, None] & (dv < DV)[None, :]
        value = tl.load(values + place[:, None] + dv[None, :], inside, 0.0)
        total = tl.dot(
            weights.to(value.dtype), value, total * shrunk[:, None], input_precision="ieee"
        )
    return total, m, norm


@triton.jit
def attend_tiles(
    q,
    keys,
    values,
    out,
    lse,
    alibi,
    sinks,
    parts,
    pages,
    tiles,
    q_token,
    q_head,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    table_width,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """out and lse of BLOCK_M rows of a part."""
    cuts: tl.constexpr = TILE // BLOCK_M
    tile = tiles + tl.program_id(0) // cuts * COLUMNS
    cut = tl.program_id(0) % cuts * BLOCK_M
    rows = tl.load(tile + 2)
    if cut >= rows:
        return
    kv_head = tl.program_id(1)
    number = tl.load(tile)
    first_row = tl.load(tile + 1) + cut
    end_row = first_row + tl.minimum(rows - cut, BLOCK_M)
    start = tl.load(parts + number * COLUMNS)
    length = tl.load(parts + number * COLUMNS + 1)
    context = tl.load(parts + number * COLUMNS + 2)

    r = first_row + tl.arange(0, BLOCK_M)
    real = r < end_row
    r = tl.minimum(r, end_row - 1)
    i = context + r // G
    head = kv_head * G + r % G
    token = (start + r // G).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    place = token * q_token + head * q_head
    query = tl.load(q + place[:, None] + d[None, :], (d < D)[None, :], 0.0)
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
    end = context + (end_row - 1) // G + 1
    # From `begin` on some row sees some key; all rows see all keys from `full` to `edge`.
    begin = 0
    full = 0
    edge = (context + first_row // G + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(context + first_row // G + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        edge = tl.maximum(edge, begin)
        full = tl.minimum(full, edge)
        total, m, norm = attend_blocks(
            total, m, norm, query, i, slope, begin, full, last, table, start, keys, values,
            key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D, BLOCK_DV,
            BLOCK_N, WINDOW, SOFTCAP, ALIBI, PAGED, PAGE, MASKED=True,
        )  # fmt: skip
    total, m, norm = attend_blocks(
        total, m, norm, query, i, slope, full, edge, edge, table, start, keys, values,
        key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_N, WINDOW, SOFTCAP, ALIBI, PAGED, PAGE, MASKED=False,
    )  # fmt: skip
    total, m, norm = attend_blocks(
        total, m, norm, query, i, slope, edge, end, last, table, start, keys, values,
        key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_N, WINDOW, SOFTCAP, ALIBI, PAGED, PAGE, MASKED=True,
    )  # fmt: skip

    dv = tl.arange(0, BLOCK_DV)
    row = token * H + head
    inside = real[:, None] & (dv < DV)[None, :]
    found = (total / norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * DV + dv[None, :], found, inside)
    if LSE:
        tl.store(lse + row, (m + tl.log2(norm)) * LN2, real)


@triton.jit
def used_splits(count, context, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Of a decoding token's splits, those that a window leaves work for: the first ones."""
    if WINDOW > 0:
        count = tl.minimum(count, tl.cdiv(tl.minimum(context + 1, WINDOW), SPLIT))
    return count


@triton.jit
def attend_splits(
    q,
    keys,
    values,
    totals,
    highest,
    sums,
    alibi,
    parts,
    pages,
    splits,
    q_token,
    q_head,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    table_width,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """m, l and the sum of values of a decoding token's heads over one split of its keys."""
    item = tl.program_id(0)
    split = splits + item * COLUMNS
    number = tl.load(split)
    which = tl.load(split + 1)
    start = tl.load(parts + number * COLUMNS)
    context = tl.load(parts + number * COLUMNS + 2)
    count = used_splits(tl.load(split + 2), context, WINDOW, SPLIT)
    if which >= count:
        return
    kv_head = tl.program_id(1)

    g = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = g < G
    head = kv_head * G + tl.minimum(g, G - 1)
    d = tl.arange(0, BLOCK_D)
    place = start.to(tl.int64) * q_token + head * q_head
    query = tl.load(q + place[:, None] + d[None, :], (d < D)[None, :], 0.0)
    i = context + tl.zeros((BLOCK_H,), tl.int32)
    slope = i.to(tl.float32)
    if ALIBI:
        slope = tl.load(alibi + head).to(tl.float32) * LOG2E

    last = context + 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(last - WINDOW, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(last - low, BLOCK_N), count) * BLOCK_N
    begin = low + which * share
    end = tl.minimum(begin + share, last)
    m = tl.full((BLOCK_H,), LOWEST, tl.float32)
    norm = tl.zeros((BLOCK_H,), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_DV), tl.float32)
    keys += kv_head.to(tl.int64) * key_head
    values += kv_head.to(tl.int64) * value_head
    total, m, norm = attend_blocks(
        total, m, norm, query, i, slope, begin, end, last, pages + number * table_width, start,
        keys, values, key_page, key_token, value_page, value_token, scale, D, DV, BLOCK_D,
        BLOCK_DV, BLOCK_N, WINDOW, SOFTCAP, ALIBI, True, PAGE, MASKED=True,
    )  # fmt: skip

    row = item.to(tl.int64) * H + head
    dv = tl.arange(0, BLOCK_DV)
    tl.store(totals + row[:, None] * DV + dv[None, :], total, real[:, None] & (dv < DV)[None, :])
    tl.store(highest + row, m, real)
    tl.store(sums + row, norm, real)


@triton.jit
def reduce_splits(
    totals,
    highest,
    sums,
    out,
    lse,
    sinks,
    parts,
    decodes,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """out and lse of one head of a decoding token."""
    decode = decodes + tl.program_id(0) * COLUMNS
    count = tl.load(decode + 2)
    if count == 0:
        return
    head = tl.program_id(1)
    number = tl.load(decode)
    count = used_splits(count, tl.load(parts + number * COLUMNS + 2), WINDOW, SPLIT)
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
        there = s < count
        row = (first_split + s).to(tl.int64) * H + head
        high = tl.load(highest + row, there, LOWEST)
        part = tl.load(
            totals + row[:, None] * DV + dv[None, :], there[:, None] & (dv < DV)[None, :], 0.0
        )
        higher = tl.maximum(m, tl.max(high, 0))
        weights = tl.exp2(high - higher)
        shrunk = tl.exp2(m - higher)
        m = higher
        norm = norm * shrunk + tl.sum(weights * tl.load(sums + row, there, 0.0), 0)
        total = total * shrunk + tl.sum(weights[:, None] * part, 0)
    row = tl.load(parts + number * COLUMNS).to(tl.int64) * H + head
    tl.store(out + row * DV + dv, (total / norm).to(out.dtype.element_ty), dv < DV)
    if LSE:
        tl.store(lse + row, (m + tl.log2(norm)) * LN2)


class Blocks(NamedTuple):
    """How a kernel is cut.

    Attributes:
        rows: of a program.
        keys: of a step, or of a program of dk and dv.
        warps: of a program.
        stages: of the pipeline that loads what comes next.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def tile_blocks(size: int, dtype: torch.dtype, paged: bool) -> Blocks:
    """Of `attend_tiles`: the most rows whose sums stay in registers, with any options.

    Args:
        size: of a head, the larger of keys' and values', a power of two.
        dtype: of q; fp32 is multiplied without tensor cores.
        paged: whether keys and values lie in pages: to read the block table is one stage more.
    """
    if dtype == torch.float32:
        return Blocks(32, 32 if size <= 128 else 16, 4 if size <= 64 else 8, 1)
    stages = 3 if paged else 2
    return Blocks(128, 64, 8, stages) if size <= 128 else Blocks(64, 32, 8, stages)


def split_blocks(size: int, dtype: torch.dtype, group: int) -> Blocks:
    """Of `attend_splits`: as `tile_blocks`.

    64 keys and values of a head of 128 are 32 KiB, read as four pages each, and one such step is
    in flight while another is worked on; with four programs on a processor that hides the memory's
    latency.
    """
    if dtype == torch.float32:
        return Blocks(16, 32 if size <= 128 else 16, 4, 1)
    return Blocks(16 if group <= 16 else 32, 64 if size <= 128 else 32, 4, 3)


def paged_attention(
    q: Tensor,
    keys: CacheRows,
    values: CacheRows,
    work: AttentionWork,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    keeps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every token to its own sequence; see the operator of that name.

    Args:
        q: [T, H, D], any strides but the last.
        keys: of the layer's cache, the batch's own included; of the batch where there is none.
        values: likewise.
        work: of the batch.
        scale: of the logits.
        window: keys seen, the token's own included; 0 for all.
        softcap: 0 for none.
        alibi: slope of each head, [H].
        sinks: logit of each head that takes weight and gives nothing, [H].
        keeps: whether backward will want the log-sum-exp.
    Returns:
        out [T, H, Dv] in q's dtype, and the log-sum-exp [T, H] in fp32 where it is wanted. Tokens
        of no part have no defined values.
    Raises:
        UnsupportedError: the heads' sizes are not among `HEAD_SIZES`, or no KV head serves them, or
            one of keys and work knows pages and the other does not.
    """
    if keys.paged != (work.pages.shape[1] > 0):
        raise UnsupportedError(
            f"keys {'in' if keys.paged else 'without'} pages, but block tables of "
            f"{work.pages.shape[1]} columns; build the lists from parts with their pages"
        )
    tokens, heads, _ = q.shape
    sizes = head_constants(q, keys, values)
    out = q.new_empty((tokens, heads, values.size))
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if keeps else None
    options = {
        "COLUMNS": work.tiles.shape[1],
        "WINDOW": window,
        "SOFTCAP": softcap,
        "ALIBI": alibi is not None,
        "PAGE": PAGE_TOKENS,
    }
    strides = (*q.stride()[:2], *keys.strides, *values.strides, work.pages.shape[1], scale)
    size = max(sizes["BLOCK_D"], sizes["BLOCK_DV"])
    if len(work.tiles):
        blocks = tile_blocks(size, q.dtype, keys.paged)
        attend_tiles[(len(work.tiles) * (TILE_ROWS // blocks.rows), keys.heads)](
            q, keys.base, values.base, out, lse, alibi, sinks, work.parts, work.pages, work.tiles,
            *strides, **sizes, **options,
            BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, TILE=TILE_ROWS,
            SINKS=sinks is not None, LSE=keeps, PAGED=keys.paged,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    if len(work.splits):
        blocks = split_blocks(size, q.dtype, sizes["G"])
        count = len(work.splits)
        totals = q.new_empty((count, heads, values.size), dtype=torch.float32)
        highest, sums = q.new_empty((2, count, heads), dtype=torch.float32)
        attend_splits[(count, keys.heads, triton.cdiv(sizes["G"], blocks.rows))](
            q, keys.base, values.base, totals, highest, sums, alibi, work.parts, work.pages,
            work.splits, *strides, **sizes, **options,
            BLOCK_H=blocks.rows, BLOCK_N=blocks.keys, SPLIT=SPLIT_KEYS,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        reduce_splits[(len(work.decodes), heads)](
            totals, highest, sums, out, lse, sinks, work.parts, work.decodes,
            H=heads, DV=values.size, BLOCK_DV=sizes["BLOCK_DV"], BLOCK_S=8,
            COLUMNS=work.decodes.shape[1], WINDOW=window, SINKS=sinks is not None, LSE=keeps,
            SPLIT=SPLIT_KEYS, num_warps=2,
        )  # fmt: skip
    return out, lse


def head_constants(q: Tensor, keys: CacheRows, values: CacheRows) -> dict[str, int]:
    """What kernels are specialised by: heads, and their sizes with those that they are padded to.

    Raises:
        UnsupportedError: of other sizes, or of heads that KV heads do not share evenly.
    """
    heads, size = q.shape[1:]
    for found in (size, values.size):
        if found not in HEAD_SIZES:
            raise UnsupportedError(
                f"attention kernels know no heads of {found}; the sizes are "
                f"{', '.join(map(str, HEAD_SIZES))}: compile with backend='torch'"
            )
    if heads % keys.heads:
        raise UnsupportedError(f"{keys.heads} KV heads cannot serve {heads} heads evenly")
    return {
        "H": heads,
        "G": heads // keys.heads,
        "D": size,
        "DV": values.size,
        "BLOCK_D": triton.next_power_of_2(size),
        "BLOCK_DV": triton.next_power_of_2(values.size),
    }

"""Launch attention's backward kernels (`backward_kernels`) for a batch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import KvGradients
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.triton.attention.backward_kernels import delta_rows, key_gradients, query_gradients
from pcg.kernels.triton.attention.blocks import architecture_of, key_blocks, query_blocks
from pcg.kernels.triton.attention.cache_rows import KvRows
from pcg.kernels.triton.attention.forward import head_constants, score_constants
from pcg.kernels.triton.attention.work import KEY_BLOCK, TILE_ROWS, AttentionWork

_DELTA_ROWS = 32
"""Rows of a program of `delta_rows`."""


def paged_attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: KvRows,
    work: AttentionWork,
    scoring: Scoring,
    sums: KvGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of attention; see `paged_attention`, whose lse holds the sinks' weight.

    Args:
        dout: gradient by out, [T, H, Dv], any strides but the last.
        out: [T, H, Dv], likewise.
        lse: [T, H], fp32.
        q: [T, H, D].
        kv: keys and values, as in forward.
        work: the batch's lists, built for backward.
        scoring: the scores' options, as in forward.
        sums: the layer's gradients of all keys and values of the pass, in fp32, to which the
            batch's are added; where keys and values lie in a cache.
    Returns:
        [T, H, D], [T, K, D] and [T, K, Dv] in q's dtype: with sums, the gradients that are final.
    Raises:
        UnsupportedError: the work is not for backward, or sums are given without a cache, or not
            given with one.
    """
    if not len(work.key_blocks):
        raise UnsupportedError("these lists are for forward alone; build them with backward=True")
    keys, values = kv
    if keys.paged != (sums is not None):
        raise UnsupportedError("sums are for keys and values in a cache, and needed with one alone")
    tokens, heads, _ = q.shape
    sizes = head_constants(q, kv)
    delta = torch.empty_like(lse)
    delta_rows[(triton.cdiv(tokens * heads, _DELTA_ROWS),)](
        dout, out, delta, tokens * heads, *dout.stride()[:2], *out.stride()[:2],
        H=heads, DV=values.size, BLOCK_DV=sizes["BLOCK_DV"], BLOCK=_DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    dq = q.new_empty(q.shape)
    dk, dv = (q.new_empty((tokens, x.heads, x.size)) for x in kv)
    strides = (*q.stride()[:2], *dout.stride()[:2], *kv.strides)
    options = score_constants(work, scoring) | {"PAGED": keys.paged}
    size = max(sizes["BLOCK_D"], sizes["BLOCK_DV"])
    blocks = query_blocks(size, q.dtype, keys.paged, architecture_of(q))
    query_gradients[(len(work.tiles) * (TILE_ROWS // blocks.rows), keys.heads)](
        q, keys.base, values.base, dout, lse, delta, dq, scoring.alibi, work.parts, work.pages,
        work.tiles, *strides, work.pages.shape[1], scoring.scale, **sizes, **options,
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, TILE=TILE_ROWS,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    blocks = key_blocks(size, q.dtype, architecture_of(q))
    keys_sum, values_sum = (None, None) if sums is None else (sums.keys, sums.values)
    key_gradients[(len(work.key_blocks) * (KEY_BLOCK // blocks.keys), keys.heads)](
        q, keys.base, values.base, dout, lse, delta, dk, dv, keys_sum, values_sum, scoring.alibi,
        work.parts, work.pages, work.key_blocks, *strides, work.pages.shape[1], scoring.scale,
        **sizes, **options, BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, TILE=KEY_BLOCK,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return dq, dk, dv

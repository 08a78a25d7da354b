"""Attention of emitted programs: by kernels if they know the heads, else by PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import ProgramBatch, once
from pcg.kernels.sizes import HEAD_SIZES, PAGE_TOKENS
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows, append
from pcg.kernels.triton.attention.library_attention import (
    WHOLE,
    attend_prompts,
    attend_whole,
    attend_whole_backward,
    takes_prompts,
)
from pcg.kernels.triton.attention.paged_attention import paged_attention, paged_attention_backward
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.ranks.step_parts import TokenParts


def attention(
    batch: ProgramBatch,
    q: Tensor,
    k: Tensor | CacheRows,
    v: Tensor | CacheRows,
    *,
    library: str | None = None,
    **scores: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of every token to its sequence, past tokens in the cache included.

    k and v are the tokens' own, or the cache that these were appended to already. `library`
    computes the part that it knows.
    """
    if isinstance(k, CacheRows) and isinstance(v, CacheRows):
        kv = KvRows(k, v)
    else:
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        is_cut = batch.parts is not None and batch.cached is None
        if is_cut or not _has_kernels(batch, q, v.shape[-1]):
            return torch_ops.attention(batch, q, k, v, **scores)
        kv = _seen(batch, k, v)
        if kv.keys.paged:
            assert batch.rows is not None
            append(k, v, batch.rows, kv)
    if batch.parts is not None:
        _share_rows(batch, batch.parts, kv)
    scoring, group = Scoring(**scores), q.shape[1] // kv.keys.heads
    if library in WHOLE and not kv.keys.paged:
        return attend_whole(library, batch, q, kv.keys.base, kv.values.base, scoring)
    if library == "flashinfer" and takes_prompts(batch, kv):
        if len(batch.longer_spans) < len(batch.spans):
            singles = _work(batch, group, backward=False, has_prompts=False)
            out, _ = paged_attention(q, kv, singles, scoring)
        else:
            out = q.new_empty((*q.shape[:2], kv.values.size))
        attend_prompts(batch, q, kv, scoring, out)
        return out, None
    return paged_attention(q, kv, _work(batch, group, backward=False), scoring, batch.keeps)


def attention_backward(
    batch: ProgramBatch,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    library: str | None = None,
    **scores: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of attention; those of a window in the cache are final."""
    if batch.parts is not None or not _has_kernels(batch, q, dout.shape[-1]):
        return torch_ops.attention_backward(batch, dout, out, lse, q, k, v, **scores)
    kv, scoring = _seen(batch, k, v), Scoring(**scores)
    if library in WHOLE and not kv.keys.paged:
        saved = (dout, out, lse, q, kv.keys.base, kv.values.base)
        return attend_whole_backward(library, batch, *saved, scoring=scoring)
    work = _work(batch, q.shape[1] // kv.keys.heads, backward=True)
    return paged_attention_backward(dout, out, lse, q, kv, work, scoring, batch.gradients)


def _share_rows(batch: ProgramBatch, parts: TokenParts, kv: KvRows) -> None:
    """Write the keys and values of other ranks' tokens into the cache."""
    assert batch.rows is not None
    assert batch.rows_of_all is not None
    page, place = batch.rows // PAGE_TOKENS, batch.rows % PAGE_TOKENS
    k, v = parts.gathered(*(rows.base[page, :, place] for rows in kv))
    append(k, v, batch.rows_of_all, kv)


def _has_kernels(batch: ProgramBatch, q: Tensor, value_size: int) -> bool:
    """Return whether kernels know the heads. UnsupportedError: not, and the rest needs no pages."""
    sizes = {q.shape[-1], value_size}
    known = sizes <= {*HEAD_SIZES} and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not known and batch.cached is not None and batch.cached[0].dim() == 4:
        raise UnsupportedError(
            f"attention kernels know no heads of {max(sizes)} in {q.dtype}; sizes are "
            f"{', '.join(map(str, HEAD_SIZES))} in float32, bfloat16 or float16: compile with "
            "backend='torch' (--backend torch)"
        )
    return known


def _seen(batch: ProgramBatch, k: Tensor | None, v: Tensor | None) -> KvRows:
    if batch.cached is not None:
        return KvRows(*map(CacheRows.of_layer, batch.cached))
    assert k is not None
    assert v is not None
    return KvRows(CacheRows.of_batch(k), CacheRows.of_batch(v))


def _work(
    batch: ProgramBatch, group: int, backward: bool, has_prompts: bool = True
) -> AttentionWork:
    """Return the lists of the batch, or of its decoding tokens, computed once for all layers."""
    recorded: AttentionWork | None = batch.known.get("recorded")
    if recorded is not None:
        return recorded

    def make() -> AttentionWork:
        spans = [span for span in batch.spans if has_prompts or span.length == 1]
        return AttentionWork.build(spans, group, batch.input_ids.device, backward=backward)

    return once(batch.known, ("attention", group, backward, has_prompts), make)

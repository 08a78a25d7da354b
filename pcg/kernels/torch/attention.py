"""Attention over ragged token-flat batches, on PyTorch alone: the reference of the kernels.

With a cache, new keys and values are appended before attention, so that a token sees cached and new
tokens alike and nothing is padded.

Where each rank of a group has a part of the tokens of every sequence, its pieces attend to the keys
and values of all ranks' tokens up to their last one, which are gathered; those of the whole pass
exist for a single layer at a time. `Span.context`, the position of a piece in its sequence,
determines the masked keys, so that windows and ALiBi are as on one rank.

Shapes: T tokens, H heads, K KV heads, D head size, m keys that a span sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, Unpack

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch, Span
from pcg.kernels.torch.attention_math import (
    Scores,
    Scoring,
    attend,
    attend_backward,
    attend_flash,
    attend_flash_backward,
    ends_of,
    flash,
    flash_backward,
    is_flash,
    is_whole,
    lse_dtype,
)
from pcg.kernels.torch.base_operators import rope_half
from pcg.kernels.torch.host_kernels import attend_single_tokens
from pcg.ranks.step_parts import TokenParts, TokenSums

Seen: TypeAlias = Callable[[Span], tuple[Tensor, Tensor]]
"""Returns keys [m, K, D] and values [m, K, Dv] of a sequence up to the end of its span."""

_attend_fused = torch.nn.functional.scaled_dot_product_attention


def attention(
    batch: ProgramBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    **scores: Unpack[Scores],
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of every token to its sequence; see the operator of that name.

    q is [T, H, D], k [T, K, D], v [T, K, Dv]; cos and sin are [T, n], or None for no rotary
    embedding; scores are the fields of `Scoring`. Returns out [T, H, Dv] and, of a batch that is
    trained on, the log-sum-exp [T, H] in fp32.
    """
    scoring = Scoring(**scores)
    tables = None if cos is None or sin is None else (cos, sin)
    cache, parts = batch.cached, batch.parts
    if cache is not None and parts is None and not (batch.longer_spans or batch.keeps):
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        if attend_single_tokens(batch, q, cache, out, scoring, (k, v), tables):
            return out, None
    if tables is not None:
        q, k = rope_half(q, *tables), rope_half(k, *tables)
    if parts is not None and cache is None:
        return _attend_parts(batch, parts, q, k, v, scoring)
    cache = batch.append(k, v)
    if cache is None and is_whole(batch, q, v, scoring):
        split = (x.unflatten(0, (-1, batch.uniform_length)) for x in (q, k, v))
        out, lse = flash(*split, bias=scoring.bias(batch.spans[0], q), scale=scoring.scale)
        return out.flatten(0, 1), lse.flatten(0, 1)
    by_flash = is_flash(q, v, scoring, trains=batch.keeps)
    if cache is None and by_flash:
        return attend_flash(q, k, v, ends_of(batch, batch.spans, cached=False), scoring)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    kept = q.new_empty(q.shape[:2], dtype=lse_dtype(q)) if batch.keeps else None
    spans = batch.spans
    if cache is not None and not batch.keeps and _decode(batch, q, *cache, out, scoring):
        spans = batch.longer_spans

    def seen(span: Span) -> tuple[Tensor, Tensor]:
        new = span.tokens
        return (k[new], v[new]) if cache is None else _seen(batch, span, cache)

    attend_spans(batch, spans, q, seen, out, kept, scoring)
    return out, kept


def attend_spans(
    batch: ProgramBatch,
    spans: Sequence[Span],
    q: Tensor,
    seen: Seen,
    out: Tensor,
    kept: Tensor | None,
    scoring: Scoring,
) -> None:
    """Write attention of some spans to `out`, and their log-sum-exp to `kept`, if any."""
    for span in spans:
        keys, values = seen(span)
        by_flash = is_flash(q, values, scoring, trains=batch.keeps)
        new = span.tokens
        out[new], lse = _attended(batch, span, q[new], keys, values, scoring, by_flash)
        if kept is not None:
            kept[new] = lse


def attention_backward(
    batch: ProgramBatch,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    **scores: Unpack[Scores],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of attention.

    For a window of sequences in the cache, k and v are read there, and dk and dv are final: later
    windows have added theirs to the batch's gradients, and this one adds its own.
    """
    scoring = Scoring(**scores)
    cache = batch.cached
    if cache is not None:
        return window_backward(
            batch, dout, out, lse, q, lambda span: _seen(batch, span, cache), scoring
        )
    assert k is not None
    assert v is not None
    if batch.parts is not None:
        saved = (dout, out, lse, q, k, v)
        return _attend_parts_backward(batch, batch.parts, *saved, scoring=scoring)
    if is_whole(batch, q, v, scoring):
        split = [x.unflatten(0, (-1, batch.uniform_length)) for x in (dout, out, lse, q, k, v)]
        bias = scoring.bias(batch.spans[0], q)
        grads = flash_backward(*split, bias=bias, scale=scoring.scale)
        dq, dk, dv = (gradient.flatten(0, 1) for gradient in grads)
        return dq, dk, dv
    if is_flash(q, v, scoring, trains=True):
        ends = ends_of(batch, batch.spans, cached=False)
        return attend_flash_backward(dout, out, lse, q, k, v, ends=ends, scoring=scoring)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for span in batch.spans:
        part = span.tokens
        arguments = (x[part] for x in (dout, out, lse, q, k, v))
        dq[part], dk[part], dv[part] = attend_backward(*arguments, span=span, scoring=scoring)
    return dq, dk, dv


def _attended(
    batch: ProgramBatch,
    span: Span,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    by_flash: bool,
) -> tuple[Tensor, Tensor]:
    if by_flash:
        return attend_flash(q, k, v, ends_of(batch, [span], cached=True), scoring)
    return attend(q, k, v, span, scoring)


def _gradients(
    batch: ProgramBatch, span: Span, saved: Sequence[Tensor], scoring: Scoring, by_flash: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if by_flash:
        ends = ends_of(batch, [span], cached=True)
        return attend_flash_backward(*saved, ends=ends, scoring=scoring)
    return attend_backward(*saved, span=span, scoring=scoring)


def _attend_parts(
    batch: ProgramBatch, parts: TokenParts, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    by_flash = is_flash(q, v, scoring, trains=batch.keeps)
    whole = parts.gathered(k, v)
    for span in batch.spans:
        part = span.tokens
        seen = _seen_of_all(whole, span)
        out[part], lse[part] = _attended(batch, span, q[part], *seen, scoring, by_flash)
    return out, lse if batch.keeps else None


def _attend_parts_backward(
    batch: ProgramBatch, parts: TokenParts, *saved: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[3:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_flash = is_flash(q, v, scoring, trains=True)
    whole = parts.gathered(k, v)
    sums = TokenSums(parts, k, v)
    for span in batch.spans:
        part = span.tokens
        arguments = (*(x[part] for x in saved[:4]), *_seen_of_all(whole, span))
        dq[part], *of_seen = _gradients(batch, span, arguments, scoring, by_flash)
        sums.add(span.origin, *of_seen)
    del whole
    dk, dv = sums.scattered()
    return dq, dk, dv


def _seen_of_all(whole: Sequence[Tensor], span: Span) -> tuple[Tensor, Tensor]:
    seen = slice(span.origin, span.origin + span.context + span.length)
    keys, values = (x[seen] for x in whole)
    return keys, values


def window_backward(
    batch: ProgramBatch,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    seen: Seen,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, and the final dk and dv of a window, whose spans attend to what they have seen."""
    assert batch.gradients is not None
    sums = batch.gradients.keys, batch.gradients.values
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (x.new_empty((q.shape[0], *x.shape[1:]), dtype=q.dtype) for x in sums)
    for span in batch.spans:
        part = span.tokens
        keys, values = seen(span)
        by_flash = is_flash(q, values, scoring, trains=True)
        arguments = (*(x[part] for x in (dout, out, lse, q)), keys, values)
        dq[part], *of_seen = _gradients(batch, span, arguments, scoring, by_flash)
        end = span.origin + span.context + span.length
        for total, gradient, final in zip(sums, of_seen, (dk, dv), strict=True):
            total[span.origin : end] += gradient
            final[part] = total[end - span.length : end]
    return dq, dk, dv


def _seen(batch: ProgramBatch, span: Span, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence up to the end of its span, [m, K, D]."""
    rows = batch.seen(span)
    if isinstance(rows, slice):
        chosen = [all_rows[:, rows] for all_rows in cache]
    else:
        chosen = [all_rows.index_select(1, rows) for all_rows in cache]
    keys, values = (some.transpose(0, 1) for some in chosen)
    return keys, values


def _decode(
    batch: ProgramBatch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scoring: Scoring
) -> bool:
    """Attend with the spans of a single token; return False if they are left to `attend`.

    Without the native kernel, heads that share a KV head are a single product. Sequences with rows
    at equal distances are one call, in which the shorter ones read on into rows that the mask
    hides. Others are gathered.
    """
    if attend_single_tokens(batch, q, (keys, values), out, scoring):
        return True
    if not scoring.is_plain(q, values) or scoring.alibi is not None:
        return False
    kv_heads, _, size = keys.shape
    (head, row, column), (v_head, v_row, _) = keys.stride(), values.stride()
    groups = batch.decode_groups(scoring.reach)
    if not groups:
        return True
    tokens = groups[0].tokens if len(groups) == 1 else torch.cat([group.tokens for group in groups])
    queries = q[tokens].view(-1, kv_heads, q.shape[1] // kv_heads, size)
    outputs = []
    start = 0
    for group in groups:
        count = group.tokens.shape[0]
        shape = (count, kv_heads, group.longest, size)
        if group.rows is not None:
            chosen = group.rows.flatten()
            k, v = (
                rows.index_select(1, chosen).unflatten(1, shape[::2]).transpose(0, 1)
                for rows in (keys, values)
            )
        else:
            k = keys.as_strided(shape, (group.stride * row, head, row, column), group.row * row)
            stride = (group.stride * v_row, v_head, v_row, column)
            v = values.as_strided(shape, stride, group.row * v_row)
        rows_of_group = queries[start : start + count]
        outputs.append(
            _attend_fused(rows_of_group, k, v, attn_mask=group.mask, scale=scoring.scale)
        )
        start += count
    every = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    out.index_copy_(0, tokens, every.view(-1, *out.shape[1:]))
    return True

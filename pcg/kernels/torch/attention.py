"""Attention over ragged token-flat batches, on PyTorch alone: the reference of the templates.

A batch is a run of sequences, one behind the other; `Span` says where one lies and how many of its
tokens are in the KV cache already. With a cache, the new keys and values are appended before they
are attended to, so a token sees cached and new tokens alike and nothing is padded.

    s = scale · q kᵀ;  s = softcap · tanh(s / softcap);  s += bias;  out = softmax(s) v

Shapes: T tokens, H heads, K KV heads, D head size, n new tokens of a span, m keys that it sees.

Long because forward and backward, with and without a cache, share what stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_attend = torch.nn.functional.scaled_dot_product_attention
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Span(Protocol):
    """One sequence's tokens in the batch.

    Attributes:
        start: its first token in the batch.
        length: tokens in the batch, n.
        context: tokens before them, in the cache.
        origin: its sequence's first token among those of a training pass.
    """

    start: int
    length: int
    context: int
    origin: int


class DecodeGroup(Protocol):
    """Sequences of one new token each that attention takes in one call.

    Attributes:
        tokens: their indices in the batch, [count].
        row: first row that the first one attends to.
        stride: rows from one sequence's first to the next one's.
        longest: rows that the longest attends to.
        mask: [count, 1, 1, longest], added to the logits; None where all are equally long.
        rows: [count, longest], rows that they attend to, where these lie at no equal distances.
    """

    tokens: Tensor
    row: int
    stride: int
    longest: int
    mask: Tensor | None
    rows: Tensor | None


class Gradients(Protocol):
    """What adds up of one layer's keys' and values' gradients, [tokens of a pass, K, D]."""

    keys: Tensor
    values: Tensor


class AttentionBatch(Protocol):
    """What attention asks of a batch: spans that cover all tokens in order, and the cache."""

    spans: Sequence[Span]
    longer_spans: Sequence[Span]
    """Those of more than one token."""
    uniform_length: int
    """Length of every span where all are equal and have no context, else 0."""
    keeps: bool
    """Whether backward will want the log-sum-exp."""
    gradients: Gradients | None
    """Of the layer whose backward runs, where the batch is a window of sequences in the cache."""

    @property
    def cached(self) -> tuple[Tensor, Tensor] | None:
        """The whole cache of the layer, as `append` returns it."""

    def seen(self, span: Any) -> slice | Tensor:
        """The rows of the cache that hold a sequence up to the end of its span."""

    def decode_groups(self, window: int) -> Sequence[DecodeGroup]:
        """The spans of one token, in groups; `window` limits the rows seen, 0 does not."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write the tokens' keys and values into this layer's cache and return the whole cache.

        Returns:
            Keys and values of all rows, [K, rows, D], or None when the batch keeps no cache.
        """


def attention(
    batch: AttentionBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every token to its own sequence; see the operator of that name.

    Args:
        batch: spans and cache.
        q: [T, H, D]; k: [T, K, D]; v: [T, K, Dv].
        scale: of the logits.
        window: keys seen, the token's own included; 0 for all.
        softcap: 0 for none.
        alibi: slope of each head, [H].
        sinks: logit of each head that takes weight and gives nothing, [H].
    Returns:
        out [T, H, Dv], and the log-sum-exp [T, H] in fp32 of a batch that is trained on.
    """
    cache = batch.append(k, v)
    plain = not softcap and sinks is None and q.shape[-1] == v.shape[-1]
    if cache is None and plain and batch.uniform_length:
        return _uniform(batch, q, k, v, scale, window, alibi)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty(q.shape[:2], dtype=_lse_dtype(q)) if batch.keeps else None
    spans = batch.spans
    if cache is not None and not batch.keeps and plain and alibi is None:
        _decode(batch, q, *cache, out, scale, window)
        spans = batch.longer_spans
    for span in spans:
        new = slice(span.start, span.start + span.length)
        if cache is None:
            keys, values = k[new], v[new]
        else:
            keys, values = _seen(batch, span, cache)
        bias = _bias(span, q, window, alibi)
        if plain and q.is_cpu:
            o, logsum = _flash(q[new][None], keys[None], values[None], scale=scale, bias=bias)
            o, logsum = o[0], logsum[0]
        else:
            o, logsum = _math(
                q[new],
                keys,
                values,
                scale=scale,
                softcap=softcap,
                bias=_or_causal(bias, span, q),
                sinks=sinks,
            )
        out[new] = o
        if lse is not None:
            lse[new] = logsum
    return out, lse


def attention_backward(
    batch: AttentionBatch,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of attention: shapes and arguments as there.

    Of a window of sequences in the cache, k and v are read there, and dk and dv are final: later
    windows have added theirs to the batch's gradients, and the window adds its own to those of all
    tokens that it saw.
    """
    cache = batch.cached
    if cache is not None:
        return _window_backward(
            batch,
            dout,
            out,
            lse,
            q,
            cache,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
        )
    assert k is not None
    assert v is not None
    plain = not softcap and sinks is None and q.shape[-1] == v.shape[-1]
    length = batch.uniform_length
    if plain and q.is_cpu and length:
        dout, out, q, k, v = (x.unflatten(0, (-1, length)) for x in (dout, out, q, k, v))
        bias = _bias(batch.spans[0], q, window, alibi)
        lse = lse.unflatten(0, (-1, length))
        grads = _flash_backward(dout, out, lse, q, k, v, scale=scale, bias=bias)
        dq, dk, dv = (gradient.flatten(0, 1) for gradient in grads)
        return dq, dk, dv
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for span in batch.spans:
        part = slice(span.start, span.start + span.length)
        arguments = [x[part] for x in (dout, out, lse, q, k, v)]
        bias = _bias(span, q, window, alibi)
        if plain and q.is_cpu:
            grads = _flash_backward(*(x[None] for x in arguments), scale=scale, bias=bias)
            dq[part], dk[part], dv[part] = (gradient[0] for gradient in grads)
        else:
            bias = _or_causal(bias, span, q)
            dq[part], dk[part], dv[part] = _math_backward(
                *arguments, scale=scale, softcap=softcap, bias=bias
            )
    return dq, dk, dv


def _window_backward(
    batch: AttentionBatch,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    scale: float,
    window: int,
    softcap: float,
    alibi: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq of the window's tokens, and the gradients of their keys and values, which are final."""
    sums = batch.gradients
    assert sums is not None
    plain = not softcap and sinks is None and q.shape[-1] == cache[1].shape[-1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (x.new_empty((q.shape[0], *x.shape[1:]), dtype=q.dtype) for x in _pair(sums))
    for span in batch.spans:
        part = slice(span.start, span.start + span.length)
        keys, values = _seen(batch, span, cache)
        arguments = [*(x[part] for x in (dout, out, lse, q)), keys, values]
        bias = _bias(span, q, window, alibi)
        if plain and q.is_cpu:
            grads = _flash_backward(*(x[None] for x in arguments), scale=scale, bias=bias)
            dq[part], *of_seen = (gradient[0] for gradient in grads)
        else:
            bias = _or_causal(bias, span, q)
            dq[part], *of_seen = _math_backward(*arguments, scale=scale, softcap=softcap, bias=bias)
        end = span.origin + span.context + span.length
        for total, gradient, own in zip(_pair(sums), of_seen, (dk, dv), strict=True):
            total[span.origin : end] += gradient
            own[part] = total[end - span.length : end]
    return dq, dk, dv


def _pair(sums: Gradients) -> tuple[Tensor, Tensor]:
    return sums.keys, sums.values


def _seen(batch: AttentionBatch, span: Span, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence up to the end of its span, [m, K, D]."""
    rows = batch.seen(span)
    if isinstance(rows, slice):
        found = [all_rows[:, rows] for all_rows in cache]
    else:
        found = [all_rows.index_select(1, rows) for all_rows in cache]
    keys, values = (some.transpose(0, 1) for some in found)
    return keys, values


def _uniform(
    batch: AttentionBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    alibi: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """All spans are whole sequences of one length: one call."""
    length = batch.uniform_length
    bias = _bias(batch.spans[0], q, window, alibi)
    split = [x.unflatten(0, (-1, length)) for x in (q, k, v)]
    if q.is_cpu:
        out, lse = _flash(*split, scale=scale, bias=bias)
        return out.flatten(0, 1), lse.flatten(0, 1)
    bias = _or_causal(bias, batch.spans[0], q)
    parts = [
        _math(*x, scale=scale, softcap=0.0, bias=bias, sinks=None) for x in zip(*split, strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _decode(
    batch: AttentionBatch,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float,
    window: int,
) -> None:
    """One token of each sequence against its own rows; heads that share a KV head are one product.

    Sequences whose rows lie at equal distances are one call. Within it the shorter ones read on
    into rows that the mask hides. What lies elsewhere is gathered.

    q: [T, H, D]; keys, values: [K, rows, D]; written to out: [T, H, D].
    """
    kv_heads, _, size = keys.shape
    (head, row, one), (v_head, v_row, _) = keys.stride(), values.stride()
    groups = batch.decode_groups(window)
    if not groups:
        return
    tokens = groups[0].tokens if len(groups) == 1 else torch.cat([group.tokens for group in groups])
    queries = q[tokens].view(-1, kv_heads, q.shape[1] // kv_heads, size)
    found = []
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
            k = keys.as_strided(shape, (group.stride * row, head, row, one), group.row * row)
            stride = (group.stride * v_row, v_head, v_row, one)
            v = values.as_strided(shape, stride, group.row * v_row)
        own = queries[start : start + count]
        found.append(_attend(own, k, v, attn_mask=group.mask, scale=scale))
        start += count
    every = found[0] if len(found) == 1 else torch.cat(found)
    out.index_copy_(0, tokens, every.view(-1, *out.shape[1:]))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q: [n, length, H, D] and so on; returns out in that layout and lse [n, length, H]."""
    out, lse = _flash_cpu(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        bias is None,
        attn_mask=bias,
        scale=scale,
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _flash_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _flash_cpu_backward(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out, lse)),
        0.0,
        bias is None,
        attn_mask=bias,
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _bias(span: Span, q: Tensor, window: int, alibi: Tensor | None) -> Tensor | None:
    """What is added to the logits, [1, 1 or H, n, m]; None for causal attention from position 0."""
    keys = span.context + span.length
    if not span.context and not (window and keys > window) and alibi is None:
        return None
    return _mask(span, q, window, alibi)


def _or_causal(bias: Tensor | None, span: Span, q: Tensor) -> Tensor:
    return _mask(span, q, 0, None) if bias is None else bias


def _mask(span: Span, q: Tensor, window: int, alibi: Tensor | None) -> Tensor:
    keys = span.context + span.length
    key = torch.arange(keys, device=q.device)
    query = torch.arange(span.context, keys, device=q.device).unsqueeze(1)
    hidden = key > query
    if window:
        hidden |= key <= query - window
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    if alibi is not None:
        distance = (key - query).to(torch.float32)
        bias = (alibi.to(torch.float32)[:, None, None] * distance).to(q.dtype)
    return bias.masked_fill(hidden, float("-inf")).view(1, -1, *hidden.shape)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[m, K, D] to [H, m, D], each KV head repeated for the heads that share it."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


def _capped_scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> tuple[Tensor, Any]:
    """Scores [H, n, m] in fp32 at least, and tanh's value where they are capped."""
    dtype = _lse_dtype(q)
    scores = q.transpose(0, 1).to(dtype) @ _grouped(k, q.shape[1]).to(dtype).transpose(1, 2)
    scores *= scale
    if not softcap:
        return scores, None
    tanh = torch.tanh(scores / softcap)
    return tanh * softcap, tanh


def _math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float,
    bias: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of one span, step by step: out [n, H, Dv] and lse [n, H]."""
    scores, _ = _capped_scores(q, k, scale, softcap)
    scores += bias[0]
    if sinks is None:
        lse = torch.logsumexp(scores, -1)
    else:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
        lse = torch.logsumexp(torch.cat((scores, sink), -1), -1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = weights @ _grouped(v, q.shape[1]).to(scores.dtype)
    return out.transpose(0, 1).to(q.dtype), lse.transpose(0, 1)


def _math_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """ds = p (dout vᵀ - rowsum(dout out)), through the cap; dq = ds k, dk = dsᵀ q, dv = pᵀ dout."""
    scores, tanh = _capped_scores(q, k, scale, softcap)
    weights = torch.exp(scores + bias[0] - lse.transpose(0, 1).unsqueeze(-1))
    d = dout.transpose(0, 1).to(scores.dtype)
    heads, kv_heads = q.shape[1], k.shape[1]
    inner = (d * out.transpose(0, 1)).sum(-1, keepdim=True)
    ds = weights * (d @ _grouped(v, heads).to(d.dtype).transpose(1, 2) - inner)
    if tanh is not None:
        ds *= 1 - tanh * tanh
    ds *= scale
    dq = ds @ _grouped(k, heads).to(d.dtype)
    dk = ds.transpose(1, 2) @ q.transpose(0, 1).to(d.dtype)
    dv = weights.transpose(1, 2) @ d
    dk, dv = (x.unflatten(0, (kv_heads, -1)).sum(1) for x in (dk, dv))
    return tuple(x.transpose(0, 1).to(q.dtype) for x in (dq, dk, dv))  # type: ignore[return-value]


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32

"""Attention over latents in the KV cache, whose products by W are keys and values.

    [K_h; V_h] = W_h + scale · B_h A        per head h; LoRA is the adapter's of each sequence
    k_h = [K_h c; r],  v_h = V_h c          expanded: prompts, training, and without a cache
    s_h = q'_h K_h · c + q_rot_h · r        absorbed: single tokens, which never multiply W by
    out_h = V_h (softmax(s)_h · c)          the latents of earlier tokens

The cache holds [c; r] of each token as one head, which keys and values share. A quantized W is kept
as a float copy.

Shapes: T tokens, H heads, N latent size, R size of the keys' common part r, m keys of a span.

Source: DeepSeek-V2 §2.1 (absorbed products).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pcg.kernels.batch import ProgramBatch, Span
from pcg.kernels.devices import uploaded_list
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.torch.attention import attend_spans, attention, window_backward
from pcg.kernels.torch.attention_math import Scoring, lse_dtype
from pcg.kernels.torch.host_kernels import attend_single_tokens
from pcg.kernels.torch.lora import as_weight
from pcg.kernels.torch.quantized import float_weight


class _Lora(NamedTuple):
    """LoRA of W for the tokens `first` to `end` of a batch: A [N, rank], scaled B [rank, out]."""

    first: int
    end: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class _Expansion:
    """W [H (K + V), N] with its LoRA; K and V are the sizes of a head's products."""

    weight: Tensor
    loras: tuple[_Lora, ...]
    heads: int
    keys: int

    @classmethod
    def of(cls, q: Tensor, rest: int, weight: Tensor, a: Any = None, b: Any = None) -> Self:
        """Make it for queries q [T, H, K + rest]."""
        whole = float_weight(weight, keeps=True)
        return cls(whole, tuple(_loras(a, b, len(q))), q.shape[1], q.shape[2] - rest)

    def lora_at(self, token: int) -> Iterator[_Lora]:
        return (lora for lora in self.loras if lora.first <= token < lora.end)

    def expanded(self, rows: Tensor, loras: Iterator[_Lora]) -> tuple[Tensor, Tensor]:
        """Return keys [m, H, K + R] and values [m, H, V] of rows [m, N + R]; `loras` of one."""
        latents, rest = rows.split([self.weight.shape[1], rows.shape[1] - self.weight.shape[1]], 1)
        product = F.linear(latents, self.weight)
        for lora in loras:
            product += (latents.to(lora.a.dtype) @ lora.a @ lora.b).to(product.dtype)
        keys, values = self._by_head(product.t())
        keys = keys.permute(2, 0, 1)
        rest = rest.unsqueeze(1).expand(-1, self.heads, -1)
        return torch.cat((keys, rest), -1), values.permute(2, 0, 1)

    def absorbed(self, q: Tensor, tokens: list[int]) -> Tensor:
        """Return q'_h K_h of queries [n, H, K] of some tokens, [n, H, N]."""
        weight, _ = self._by_head(self.weight)
        rows = q.transpose(0, 1)
        y = rows @ weight
        for lora, part in self._parts(tokens):
            b, _ = self._by_head(lora.b.t())
            y[:, part] += ((rows[:, part].to(b.dtype) @ b) @ lora.a.t()).to(y.dtype)
        return y.transpose(0, 1)

    def values(self, sums: Tensor, tokens: list[int]) -> Tensor:
        """Return V_h s of weighted sums of latents [n, H, N] of some tokens, [n, H, V]."""
        _, weight = self._by_head(self.weight)
        rows = sums.transpose(0, 1)
        if rows.is_cpu and rows.dtype is torch.bfloat16:
            # oneDNN's batched product by transposed matrices takes 1.7 to 5 times as long.
            y = torch.stack([F.linear(*of_head) for of_head in zip(rows, weight, strict=True)])
        else:
            y = rows @ weight.transpose(1, 2)
        for lora, part in self._parts(tokens):
            _, b = self._by_head(lora.b.t())
            y[:, part] += ((rows[:, part].to(b.dtype) @ lora.a) @ b.transpose(1, 2)).to(y.dtype)
        return y.transpose(0, 1)

    def _by_head(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """View x [H (K + V), n] as its rows of keys [H, K, n] and of values [H, V, n]."""
        by_head = x.unflatten(0, (self.heads, -1))
        return by_head[:, : self.keys], by_head[:, self.keys :]

    def _parts(self, tokens: list[int]) -> Iterator[tuple[_Lora, slice]]:
        for lora in self.loras:
            part = slice(bisect_left(tokens, lora.first), bisect_left(tokens, lora.end))
            if part.start < part.stop:
                yield lora, part


def _loras(a: Any, b: Any, tokens: int) -> Iterator[_Lora]:
    """Yield the LoRA of each adapter of a batch, in each width of a site's stacks."""
    if isinstance(a, tuple):
        for of_width in zip(a, b, strict=True):
            yield from _loras(*of_width, tokens)
    elif a is not None and b is not None:
        a, b = as_weight(a), as_weight(b)
        if a.segments is None:
            yield _Lora(0, tokens, a.weight.t(), b.weight.t() * b.scale)
            return
        ends = accumulate(a.segments.sizes, initial=a.segments.start)
        for number, (first, end) in enumerate(pairwise(ends)):
            if first < end and a.present[number]:
                yield _Lora(first, end, a.weight[number], b.weight[number])


def latent_attention(
    batch: ProgramBatch,
    q: Tensor,
    latents: Tensor,
    rest: Tensor,
    *weights: Any,
    scale: float,
    value_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Attend with q [T, H, K + R] to latents [T, N] and `rest` [T, 1, R]; see the operator.

    `weights` are W [H (K + V), N], and A and B of its LoRA if any. Returns out [T, H, V] and, of a
    batch that is trained on, the log-sum-exp [T, H] in fp32.
    """
    expansion = _Expansion.of(q, rest.shape[2], *weights)
    rows = torch.cat((latents, rest[:, 0]), 1)
    cached = batch.cached
    if cached is None:
        parts = [
            expansion.expanded(rows[span.tokens], expansion.lora_at(span.start))
            for span in batch.spans
        ]
        keys, values = (torch.cat(each) for each in zip(*parts, strict=True))
        return attention(batch, q, keys, values, scale=scale)
    cache, _ = cached
    if _is_paged(cache):
        assert batch.rows is not None
        cache[_places(batch.rows)] = rows
    else:
        batch.append(rows.unsqueeze(1), rows[:, None][:, :0, :0])
    scoring = Scoring(scale)
    out = q.new_empty((*q.shape[:2], value_size))
    kept = q.new_empty(q.shape[:2], dtype=lse_dtype(q)) if batch.keeps else None
    spans = batch.spans
    if not batch.keeps:
        spans = batch.longer_spans
        _decode(batch, q, cache, out, expansion, scoring)

    def seen(span: Span) -> tuple[Tensor, Tensor]:
        return _seen(batch, span, cache, expansion)

    attend_spans(batch, spans, q, seen, out, kept, scoring)
    return out, kept


def latent_window_backward(
    batch: ProgramBatch,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    *weights: Any,
    scale: float,
    rest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, and the final dk and dv of a window's tokens; latents are in the cache."""
    assert batch.cached is not None
    cache, _ = batch.cached
    expansion = _Expansion.of(q, rest, *weights)

    def seen(span: Span) -> tuple[Tensor, Tensor]:
        return _seen(batch, span, cache, expansion)

    return window_backward(batch, dout, out, lse, q, seen, Scoring(scale))


def _seen(
    batch: ProgramBatch, span: Span, cache: Tensor, expansion: _Expansion
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a sequence up to the end of its span."""
    return expansion.expanded(_rows(batch, span, cache), expansion.lora_at(span.start))


def _rows(batch: ProgramBatch, span: Span, cache: Tensor) -> Tensor:
    rows = batch.seen(span)
    if _is_paged(cache):
        return cache[_places(_numbers(rows, cache.device))]
    return cache[0, rows] if isinstance(rows, slice) else cache[0].index_select(0, rows)


def _is_paged(cache: Tensor) -> bool:
    """Return whether a cache is [pages, 1, PAGE_TOKENS, N + R], and not [1, rows, N + R]."""
    return cache.dim() == 4


def _places(rows: Tensor) -> tuple[Tensor, int, Tensor]:
    """Return the index of rows in a paged cache."""
    return rows // PAGE_TOKENS, 0, rows % PAGE_TOKENS


def _numbers(rows: slice | Tensor, device: torch.device) -> Tensor:
    if isinstance(rows, slice):
        return torch.arange(rows.start, rows.stop, device=device)
    return rows


_MOST_GATHERED = 2**26
"""Numbers of latents that decoding gathers at a time."""


def _groups(spans: Sequence[Span], width: int) -> Iterator[list[Span]]:
    """Yield spans by their lengths, as many as `_MOST_GATHERED` allows after padding."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda span: -span.context):
        most = (group[0] if group else span).context + 1
        if group and (len(group) + 1) * most * width > _MOST_GATHERED:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _decode(
    batch: ProgramBatch,
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    expansion: _Expansion,
    scoring: Scoring,
) -> None:
    """Attend with the spans of a single token, by absorbed products."""
    singles = [span for span in batch.spans if span.length == 1]
    if not singles:
        return
    tokens = [span.start for span in singles]
    size = expansion.weight.shape[1]
    chosen = q if len(tokens) == len(q) else q[tokens]
    absorbed = expansion.absorbed(chosen[..., : expansion.keys], tokens)
    queries = torch.cat((absorbed, chosen[..., expansion.keys :]), -1)
    sums = q.new_empty((*q.shape[:2], size))
    places = queries
    if len(tokens) < len(q):
        places = q.new_empty((*q.shape[:2], queries.shape[2]))
        places[tokens] = queries
    pair = cache, cache[..., :size]
    if _is_paged(cache) or not attend_single_tokens(batch, places, pair, sums, scoring):
        for group in _groups(singles, cache.shape[-1]):
            seen = [_numbers(batch.seen(span), cache.device) for span in group]
            ends = uploaded_list([span.context + 1 for span in group], torch.int64, cache.device)
            rows = pad_sequence(seen, batch_first=True)
            later = torch.arange(rows.shape[1], device=cache.device) >= ends[:, None]
            rows = torch.where(later, rows[:, :1], rows)  # others' rows may hold NaN
            latents = cache[_places(rows)] if _is_paged(cache) else cache[0, rows]
            latents = latents.to(lse_dtype(q))
            starts = [span.start for span in group]
            scores = places[starts].to(latents.dtype) @ latents.mT * scoring.scale
            scores = scores.masked_fill(later[:, None], float("-inf"))
            sums[starts] = (scores.softmax(-1) @ latents[..., :size]).to(sums.dtype)
    chosen = sums if len(tokens) == len(q) else sums[tokens]
    out[tokens] = expansion.values(chosen, tokens)

"""Attention where each rank of a group has a part of the tokens of every sequence.

A rank's pieces attend to the keys and values of all ranks' tokens up to their own last one, which
are gathered for it; those of the whole pass exist for one layer at a time. Where pieces stand in
their sequences, `Span.context`, decides what masks hide, so that windows and ALiBi are as on one
rank; `pcg.parallel.ranks.context_parallel` deals the tokens.

Shapes: T own tokens, H heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch, Span
from pcg.kernels.torch.attention_math import Scoring, attend, attend_backward, lse_dtype
from pcg.kernels.torch.varlen_attention import (
    attend_flash,
    attend_flash_backward,
    ends_of,
    is_flash,
)
from pcg.parallel.ranks.context_parallel import TokenParts, TokenSums


def attend_parts(
    batch: ProgramBatch, parts: TokenParts, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """out [T, H, Dv] and lse [T, H] of q [T, H, D], k [T, K, D] and v [T, K, Dv]."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    by_flash = is_flash(q, v, scoring, trains=batch.keeps)
    whole = parts.gathered(k, v)
    for span in batch.spans:
        own = slice(span.start, span.start + span.length)
        seen = _seen(whole, span)
        if by_flash:
            ends = ends_of(batch, [span], cached=True)
            out[own], lse[own] = attend_flash(q[own], *seen, ends, scoring)
        else:
            out[own], lse[own] = attend(q[own], *seen, span, scoring)
    return out, lse if batch.keeps else None


def attend_parts_backward(
    batch: ProgramBatch, parts: TokenParts, *saved: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attend_parts`, from dout, out, lse, q, k and v of this rank's tokens."""
    q, k, v = saved[3:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_flash = is_flash(q, v, scoring, trains=True)
    whole = parts.gathered(k, v)
    sums = TokenSums(parts, k, v)
    for span in batch.spans:
        own = slice(span.start, span.start + span.length)
        arguments = (*(x[own] for x in saved[:4]), *_seen(whole, span))
        if by_flash:
            ends = ends_of(batch, [span], cached=True)
            dq[own], *of_seen = attend_flash_backward(*arguments, ends=ends, scoring=scoring)
        else:
            dq[own], *of_seen = attend_backward(*arguments, span=span, scoring=scoring)
        sums.add(span.origin, *of_seen)
    del whole
    dk, dv = sums.scattered()
    return dq, dk, dv


def _seen(whole: Sequence[Tensor], span: Span) -> tuple[Tensor, Tensor]:
    """The keys and values of a span's sequence up to its end."""
    seen = slice(span.origin, span.origin + span.context + span.length)
    keys, values = (x[seen] for x in whole)
    return keys, values

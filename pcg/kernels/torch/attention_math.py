"""Attention of tokens to keys: the CPU's fused kernel, CUDA's flash kernels, or step by step.

    s = scale · q kᵀ;  s = softcap · tanh(s / softcap);  s += bias;  out = softmax(s) v

Scores and masks of a long span never exist as a whole: its tokens are taken in blocks, each of
which sees no keys after its own. CUDA's kernels are FlashAttention-2's, of 16 bits, which take all
sequences of a batch without scores, as `torch.nn.attention.varlen` has them: queries and keys of
sequences lie in a row, `Ends` says where each ends, and the last query of a sequence
sees its last key. A sink is added to their result, and backward is theirs, as it reads out' and
lse' alone:

    lse' = ln(exp lse + exp sink);  out' = exp(lse - lse') out

Shapes: T tokens, H heads, K KV heads, D head size, n new tokens of a span, m keys that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Required, TypedDict

import torch
from torch import Tensor

from pcg.ir.operators.attention import BLOCK_BYTES
from pcg.kernels.batch import ProgramBatch, Span, once
from pcg.kernels.devices import uploaded_list

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_COPIES = 6
"""Copies of scores that backward has at once, with a cap; see the operator's `temporaries`."""


class Scores(TypedDict, total=False):
    """The fields of `Scoring`, as emitted programs name them."""

    scale: Required[float]
    window: int
    chunk: int
    softcap: float
    alibi: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class Scoring:
    """The options of attention's scores of queries and keys; see the operator `attention`."""

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    alibi: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def reach(self) -> int:
        """The tokens that a token sees at most; negative for a chunk, 0 for all."""
        return self.window or -self.chunk

    def is_plain(self, q: Tensor, v: Tensor) -> bool:
        return not self.softcap and self.sinks is None and q.shape[-1] == v.shape[-1]

    def bias(self, span: Span, q: Tensor) -> Tensor | None:
        """Return `mask`, or None for causal attention from position 0."""
        keys = span.context + span.length
        is_cut = bool(span.context) or bool(self.reach and keys > abs(self.reach))
        return self.mask(span, q) if is_cut or self.alibi is not None else None

    def mask(self, span: Span, q: Tensor) -> Tensor:
        """Return the numbers added to the logits, [1, 1 or H, n, m], in q's dtype."""
        # In place throughout: each copy would be of scores of all pairs.
        keys = span.context + span.length
        first = span.context - self.window + 1  # the diagonal of the first key in the window
        if self.alibi is None:
            seen = torch.ones((1, span.length, keys), dtype=q.dtype, device=q.device)
            seen.tril_(span.context)
            if self.chunk:
                for start in range(span.context // self.chunk * self.chunk, keys, self.chunk):
                    seen[:, max(start - span.context, 0) :, :start] = 0
            return (seen.triu_(first) if self.window else seen).log_().unsqueeze(0)
        key = torch.arange(keys, device=q.device)
        query = torch.arange(span.context, keys, device=q.device).unsqueeze(1)
        slopes = self.alibi.to(torch.float32)[:, None, None]
        bias = (slopes * (key.to(torch.float32) - query)).to(q.dtype)
        bias.masked_fill_(key > query, float("-inf"))
        if self.window:
            bias.masked_fill_(key <= query - self.window, float("-inf"))
        if self.chunk:
            bias.masked_fill_(key < query - query % self.chunk, float("-inf"))
        return bias.unsqueeze(0)


def blocks_of(span: Span, q: Tensor, is_fused: bool, scoring: Scoring) -> list[Span]:
    """Cut a span into blocks of at most BLOCK_BYTES, or a row; starts are within the span.

    The CPU's fused kernel has masks alone.
    """
    rows, pair_bytes = span.length, _COPIES * lse_dtype(q).itemsize * q.shape[1]
    if is_fused:
        heads = 0 if scoring.alibi is None else q.shape[1]
        size = q.dtype.itemsize
        pair_bytes = max(heads * max(6, 2 * size), size if scoring.reach else 0)
    if pair_bytes:
        row_bytes = pair_bytes * (span.context + span.length)
        rows = max(1, min(rows, BLOCK_BYTES // row_bytes))
    return [
        span._replace(start=first, length=min(rows, span.length - first), context=context)
        for first in range(0, span.length, rows)
        for context in (span.context + first,)
    ]


def is_whole(batch: ProgramBatch, q: Tensor, v: Tensor, scoring: Scoring) -> bool:
    """Return whether the CPU's fused kernel takes all sequences, of equal length, at once."""
    is_fused = bool(batch.uniform_length) and scoring.is_plain(q, v) and is_host(q)
    return is_fused and len(blocks_of(batch.spans[0], q, True, scoring)) == 1


def is_host(q: Tensor) -> bool:
    """Return whether q lies in host memory."""
    return q.is_cpu


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """out [n, H, Dv] and lse [n, H] of q [n, H, D], k [m, K, D] and v [m, K, Dv]."""
    is_fused = scoring.is_plain(q, v) and is_host(q)
    run = _fused_block if is_fused else _attend_block
    blocks = blocks_of(span, q, is_fused, scoring)
    if len(blocks) == 1:
        return run(q, k, v, span, scoring)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    for block in blocks:
        rows, seen = _places(block)
        out[rows], lse[rows] = run(q[rows], k[seen], v[seen], block, scoring)
    return out, lse


def _places(block: Span) -> tuple[slice, slice]:
    rows = slice(block.start, block.start + block.length)
    return rows, slice(block.context + block.length)


def _fused_block(
    q: Tensor, k: Tensor, v: Tensor, span: Span, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    bias = scoring.bias(span, q)
    out, lse = flash(q[None], k[None], v[None], bias=bias, scale=scoring.scale)
    return out[0], lse[0]


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, span: Span, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    scores, _ = _capped_scores(q, k, scoring)
    scores += scoring.mask(span, q)[0]
    if scoring.sinks is None:
        lse = torch.logsumexp(scores, -1)
    else:
        sink = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
        lse = torch.logsumexp(torch.cat((scores, sink), -1), -1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = weights @ _grouped(v, q.shape[1]).to(scores.dtype)
    return out.transpose(0, 1).to(q.dtype), lse.transpose(0, 1)


def attend_backward(*saved: Tensor, span: Span, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attend`, from dout, out, lse, q, k and v.

    ds = p (dout vᵀ - rowsum(dout out)), through the cap; dq = ds k, dk = dsᵀ q, dv = pᵀ dout.
    """
    q, k, v = saved[3:]
    is_fused = scoring.is_plain(q, v) and is_host(q)
    run = _fused_gradients if is_fused else _gradients_of_block
    blocks = blocks_of(span, q, is_fused, scoring)
    if len(blocks) == 1:
        dq, dk, dv = run(*saved, span=span, scoring=scoring)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    dtype = lse_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for block in blocks:
        rows, seen = _places(block)
        of_block = (*(x[rows] for x in saved[:4]), k[seen], v[seen])
        gradients = run(*of_block, span=block, scoring=scoring)
        for total, part, gradient in zip((dq, dk, dv), (rows, seen, seen), gradients, strict=True):
            total[part] += gradient
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _fused_gradients(*saved: Tensor, span: Span, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    bias = scoring.bias(span, saved[3])
    dq, dk, dv = flash_backward(*(x[None] for x in saved), bias=bias, scale=scoring.scale)
    return dq[0], dk[0], dv[0]


def _gradients_of_block(
    *saved: Tensor, span: Span, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out, lse, q, k, v = saved
    scores, tanh = _capped_scores(q, k, scoring)
    weights = torch.exp(scores + scoring.mask(span, q)[0] - lse.transpose(0, 1).unsqueeze(-1))
    d = dout.transpose(0, 1).to(scores.dtype)
    heads, kv_heads = q.shape[1], k.shape[1]
    inner = (d * out.transpose(0, 1)).sum(-1, keepdim=True)
    ds = weights * (d @ _grouped(v, heads).to(d.dtype).transpose(1, 2) - inner)
    if tanh is not None:
        ds *= 1 - tanh * tanh
    ds *= scoring.scale
    dq = ds @ _grouped(k, heads).to(d.dtype)
    dk = ds.transpose(1, 2) @ q.transpose(0, 1).to(d.dtype)
    dv = weights.transpose(1, 2) @ d
    dk, dv = (x.unflatten(0, (kv_heads, -1)).sum(1) for x in (dk, dv))
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out [n, length, H, Dv] and lse [n, length, H] of n sequences, on the CPU."""
    out, lse = _flash_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, bias is None, attn_mask=bias, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def flash_backward(
    *saved: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `flash`, from dout, out, lse, q, k and v."""
    dout, out, lse, q, k, v = (x.transpose(1, 2) for x in saved)
    dq, dk, dv = _flash_cpu_backward(
        dout, q, k, v, out, lse, 0.0, bias is None, attn_mask=bias, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[m, K, D] to [H, m, D], each KV head repeated for the heads that share it."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


def _capped_scores(q: Tensor, k: Tensor, scoring: Scoring) -> tuple[Tensor, Any]:
    """Return scores [H, n, m] in fp32 at least, and tanh's value if they are capped."""
    dtype = lse_dtype(q)
    scores = q.transpose(0, 1).to(dtype) @ _grouped(k, q.shape[1]).to(dtype).transpose(1, 2)
    scores *= scoring.scale
    if not scoring.softcap:
        return scores, None
    tanh = torch.tanh(scores / scoring.softcap)
    return tanh * scoring.softcap, tanh


def lse_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of scores and the log-sum-exp: fp32, or fp64 for fp64."""
    return torch.promote_types(q.dtype, torch.float32)


_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_LARGEST_TRAINED_HEAD = 192
"""The largest heads whose backward fits the shared memory of capabilities 8.6, 8.9 and 12."""
_LARGE_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Capabilities with more shared memory."""


class Ends(NamedTuple):
    """Prefix sums of sequence lengths of queries and keys, [n + 1], int32, and the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def is_flash(q: Tensor, v: Tensor, scoring: Scoring, *, trains: bool) -> bool:
    """Return whether the kernels take attention of q [T, H, D] and values v [M, K, Dv]."""
    size = q.shape[-1]
    if not has_flash(q) or q.dtype not in _DTYPES or scoring.alibi is not None:
        return False
    if scoring.softcap or scoring.chunk or size != v.shape[-1] or size % 8 or size > _LARGEST_HEAD:
        return False
    return not trains or size <= _LARGEST_TRAINED_HEAD or _capability(q) in _LARGE_MEMORY


def has_flash(q: Tensor) -> bool:
    """Return whether the kernels run on q's device."""
    return (
        q.is_cuda
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and _capability(q) >= (8, 0)
    )


def _capability(q: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device)


def ends_of(batch: ProgramBatch, spans: Sequence[Span], *, cached: bool) -> Ends:
    """Return the ends of spans, uploaded once for all layers.

    Args:
        cached: True if keys are those of a sequence from its start, not the span's.
    """

    def make() -> Ends:
        lengths = [span.length for span in spans]
        keys = [span.context + span.length if cached else span.length for span in spans]
        queries, of_keys = (
            uploaded_list([0, *accumulate(each)], torch.int32, batch.input_ids.device)
            for each in (lengths, keys)
        )
        return Ends(queries, of_keys, max(lengths), max(keys))

    key = ("ends", tuple((span.start, span.length) for span in spans), cached)
    return once(batch.known, key, make)


def attend_flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Ends, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [T, H] of q [T, H, D], k [M, K, D] and v [M, K, D]."""
    out, sums, *_ = _forward(
        q, k, v, *ends, 0.0, True, False, scale=scoring.scale, **window_sizes(scoring)
    )
    lse = sums.transpose(0, 1)
    if scoring.sinks is None:
        return out, lse
    total = torch.logaddexp(lse, scoring.sinks.to(lse.dtype))
    return out * torch.exp(lse - total).unsqueeze(-1).to(out.dtype), total


def attend_flash_backward(
    *saved: Tensor, ends: Ends, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attend_flash`, from dout, out, lse, q, k and v."""
    dout, out, lse, q, k, v = saved
    # Nothing is dropped out, so the state of random numbers is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = q.new_empty(0)
    dq, dk, dv = _backward(
        dout, q, k, v, out, lse.transpose(0, 1).contiguous(), *ends, 0.0, True, state, unused,
        scale=scoring.scale, **window_sizes(scoring),
    )  # fmt: skip
    return dq, dk, dv


def window_sizes(scoring: Scoring) -> dict[str, int]:
    """Return the keys before and after a token that it sees, as flash kernels take them."""
    return {
        "window_size_left": scoring.window - 1 if scoring.window else -1,
        "window_size_right": 0 if scoring.window else -1,
    }

"""Attention's operators on GPUs: by our kernels, by libraries, or by PyTorch.

Libraries (`pcg.kernels.attention_libraries`) compute prompts and training. Each is imported at its
first call, through its public module, and reads data in place: FlashInfer the cache's pages and
block tables, flash-attention the batch's tokens.

Shapes: T tokens, H heads, K KV heads, D head size, n sequences.
Source: flashinfer.BatchPrefillWithPagedKVCacheWrapper; flash_attn.flash_attn_interface, and
flash-attention's hopper/flash_attn_interface.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from itertools import accumulate, chain, cycle
from typing import Any, Unpack

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import ProgramBatch, Span, once
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.kernels.sizes import HEAD_SIZES, PAGE_TOKENS
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.attention_math import Scores, Scoring, ends_of, window_sizes
from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows, append
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
    **scores: Unpack[Scores],
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
    **scores: Unpack[Scores],
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


_WORKSPACE_BYTES = 128 * 2**20
"""Memory for the split keys of FlashInfer, as its documentation has it."""
_PLANNERS = 4
"""Plans that are alive at once: of two steps, in models whose layers have two windows."""


def takes_prompts(batch: ProgramBatch, kv: KvRows) -> bool:
    """Return whether FlashInfer computes a batch's prompts: eager steps over separate pages.

    Keys and values have equal strides, and nothing is trained on; a recorded step has its lists.
    """
    keys, values = kv
    return (
        keys.base.dim() == 4
        and keys.strides == values.strides
        and not batch.keeps
        and "recorded" not in batch.known
        and len(batch.longer_spans) > 0
    )


def attend_prompts(
    batch: ProgramBatch, q: Tensor, kv: KvRows, scoring: Scoring, out: Tensor
) -> None:
    """Write the attention of all spans of several tokens to `out`, [T, H, D]; q likewise."""
    planner, rows = _planned(batch, q, kv, scoring)
    cached = (kv.keys.base, kv.values.base)
    if isinstance(rows, slice):
        planner.run(q[rows], cached, out=out[rows])
    else:
        out.index_copy_(0, rows, planner.run(q.index_select(0, rows), cached))


def _planned(
    batch: ProgramBatch, q: Tensor, kv: KvRows, scoring: Scoring
) -> tuple[Any, slice | Tensor]:
    """Return a planned wrapper, once a step for all layers, and the rows of the prompts."""
    heads, kv_heads, size = q.shape[1], kv.keys.heads, kv.keys.size
    key = ("flashinfer", heads, kv_heads, size, q.dtype, scoring.window, scoring.scale)
    if key not in batch.known:
        spans = batch.longer_spans
        tokens = [span.context + span.length for span in spans]
        tables = [
            span.table.pages[: -(-seen // PAGE_TOKENS)]
            for span, seen in zip(spans, tokens, strict=True)
            if span.table is not None
        ]
        pages = list(chain.from_iterable(tables))
        planner = next(_planners(q.device))
        planner.plan(
            _host([0, *accumulate(span.length for span in spans)]),
            _host([0, *accumulate(map(len, tables))]),
            uploaded_list(pages, torch.int32, q.device),
            _host([(seen - 1) % PAGE_TOKENS + 1 for seen in tokens]),
            heads,
            kv_heads,
            size,
            PAGE_TOKENS,
            causal=True,
            sm_scale=scoring.scale,
            window_left=window_sizes(scoring)["window_size_left"],
            q_data_type=q.dtype,
            kv_data_type=kv.keys.base.dtype,
        )
        batch.known[key] = planner, _rows(spans, q.device)
    plan: tuple[Any, slice | Tensor] = batch.known[key]
    return plan


@functools.cache
def _planners(device: torch.device) -> Any:
    """Return wrappers in turn: a plan's lists are read during the next plan."""
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return cycle([wrapper(workspace, "HND") for _ in range(_PLANNERS)])


def _host(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _rows(spans: Sequence[Span], device: torch.device) -> slice | Tensor:
    """Return the tokens of spans: a slice if they are consecutive."""
    ends = [span.start + span.length for span in spans]
    if all(end == span.start for end, span in zip(ends, spans[1:], strict=False)):
        return slice(spans[0].start, ends[-1])
    parts = [torch.arange(span.start, end) for span, end in zip(spans, ends, strict=True)]
    return uploaded(torch.cat(parts), device)


# ---------------------------------------------------------------------------------- training


WHOLE = ("flash_attn", "flash_attn_3")
"""Libraries that train on whole sequences."""


def attend_whole(
    name: str, batch: ProgramBatch, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H] of whole sequences, by a library of `WHOLE`."""
    ends = ends_of(batch, batch.spans, cached=False)
    if name == "flash_attn_3":
        library = importlib.import_module("flash_attn_interface")
        out, lse, *_ = library._flash_attn_forward(
            q,
            k,
            v,
            **_ends(ends),
            softmax_scale=scoring.scale,
            causal=True,
            **window_sizes(scoring),
        )
        return out, lse.transpose(0, 1)
    library = importlib.import_module("flash_attn.flash_attn_interface")
    out, lse, *_ = library._flash_attn_varlen_forward(
        q, k, v, *ends, 0.0, scoring.scale, True, **window_sizes(scoring)
    )
    return out, lse.transpose(0, 1)


def attend_whole_backward(
    name: str, batch: ProgramBatch, *saved: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of `attend_whole`, from dout, out, lse, q, k and v."""
    dout, out, lse, q, k, v = saved
    ends = ends_of(batch, batch.spans, cached=False)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if name == "flash_attn_3":
        library = importlib.import_module("flash_attn_interface")
        library._flash_attn_backward(
            dout, q, k, v, out, lse.transpose(0, 1).contiguous(), **_ends(ends), dq=dq, dk=dk,
            dv=dv, softmax_scale=scoring.scale, is_causal=True, **window_sizes(scoring),
            deterministic=True,
        )  # fmt: skip
        return dq, dk, dv
    library = importlib.import_module("flash_attn.flash_attn_interface")
    library._flash_attn_varlen_backward(
        dout, q, k, v, out, lse.transpose(0, 1).contiguous(), dq, dk, dv, *ends, 0.0,
        scoring.scale, True, **window_sizes(scoring), softcap=0.0, alibi_slopes=None,
        deterministic=True,
    )  # fmt: skip
    return dq, dk, dv


def _ends(ends: Sequence[Any]) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, ends, strict=True))

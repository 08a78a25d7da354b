"""The functions that emitted Triton programs call: kernels, and PyTorch's where there is none.

Names, shapes and meanings are those of `torch_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import ProgramBatch
from pcg.kernels.sizes import HEAD_SIZES, ROW_ALIGNMENT
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.triton.adapters import segmented_lora, trained_adapters
from pcg.kernels.triton.adapters.rank_rows import RankRows, int32_on, rank_rows
from pcg.kernels.triton.adapters.segmented_activate import segmented_activate
from pcg.kernels.triton.adapters.segmented_vectors import segmented_bias_add, segmented_scale
from pcg.kernels.triton.adapters.token_tiles import (
    DECODE_BLOCK,
    PREFILL_BLOCK,
    TokenTiles,
    token_tiles,
)
from pcg.kernels.triton.adapters.trained_adapters import (
    asked_outer,
    bottleneck_backward,
    expand_backward,
    lora_linear_backward,
    outer,
    scaled_outer,
)
from pcg.kernels.triton.adapters.trained_vectors import (
    asked_inner,
    asked_sum_tokens,
    inner,
    sum_tokens,
)
from pcg.kernels.triton.attention.backward import paged_attention_backward
from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows, append
from pcg.kernels.triton.attention.decode_lists import DecodeLists, decode_room
from pcg.kernels.triton.attention.forward import paged_attention
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.kernels.triton.fused import FusedPart, fused, side_by_side
from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy
from pcg.kernels.triton.sampling import draw, greedy
from pcg.kernels.triton.sign_bits import pack_signs, relu_backward_packed

__all__ = [
    "DecodeLists",
    "FusedPart",
    "activate",
    "add_lora",
    "asked_inner",
    "asked_outer",
    "asked_sum_tokens",
    "attention",
    "attention_backward",
    "bias_add",
    "bottleneck_backward",
    "decode_room",
    "draw",
    "expand_add",
    "expand_backward",
    "fused",
    "greedy",
    "inner",
    "linear_cross_entropy",
    "lora_linear_backward",
    "outer",
    "pack_signs",
    "relu_backward_packed",
    "scale",
    "scaled_outer",
    "shrink",
    "side_by_side",
    "sum_tokens",
]


def __getattr__(name: str) -> Any:
    return getattr(torch_ops, name)


def attention(  # emitted programs name each of its nine parameters
    batch: ProgramBatch,
    q: Tensor,
    k: Tensor | CacheRows,
    v: Tensor | CacheRows,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every token to its own sequence, past ones in the cache included.

    k and v are the tokens' own, or the cache that these were appended to already.
    """
    scoring = Scoring(scale, window, softcap, alibi, sinks)
    if isinstance(k, CacheRows) and isinstance(v, CacheRows):
        kv = KvRows(k, v)
    else:
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        if not _has_kernels(batch, q, v.shape[-1]):
            return torch_ops.attention(
                batch, q, k, v,
                scale=scale, window=window, softcap=softcap, alibi=alibi, sinks=sinks,
            )  # fmt: skip
        kv = _seen(batch, k, v)
        if kv.keys.paged:
            assert batch.rows is not None
            append(k, v, batch.rows, kv)
    work = _work(batch, q.shape[1] // kv.keys.heads, backward=False)
    return paged_attention(q, kv, work, scoring, batch.keeps)


def attention_backward(  # emitted programs name each of its twelve parameters
    batch: ProgramBatch,
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
    """dq, dk, dv of attention; of a window of sequences in the cache, dk and dv are final."""
    scoring = Scoring(scale, window, softcap, alibi, sinks)
    if not _has_kernels(batch, q, dout.shape[-1]):
        return torch_ops.attention_backward(
            batch, dout, out, lse, q, k, v,
            scale=scale, window=window, softcap=softcap, alibi=alibi, sinks=sinks,
        )  # fmt: skip
    kv = _seen(batch, k, v)
    work = _work(batch, q.shape[1] // kv.keys.heads, backward=True)
    return paged_attention_backward(dout, out, lse, q, kv, work, scoring, batch.gradients)


def _has_kernels(batch: ProgramBatch, q: Tensor, value_size: int) -> bool:
    """Return whether attention's kernels know the sizes of heads, and the dtype.

    Raises:
        UnsupportedError: they do not, and nothing else reads the cache's pages.
    """
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
    """Where keys and values are read: the layer's cache, or the batch's own where there is none."""
    if batch.cached is not None:
        return KvRows(*map(CacheRows.of_layer, batch.cached))
    assert k is not None
    assert v is not None
    return KvRows(CacheRows.of_batch(k), CacheRows.of_batch(v))


def _work(batch: ProgramBatch, group: int, backward: bool) -> AttentionWork:
    """The batch's lists, made once for all layers of so many heads a KV head."""
    recorded: AttentionWork | None = batch.known.get("decoding")
    if recorded is not None:
        return recorded
    key = ("attention", group, backward)
    if key not in batch.known:
        device = batch.input_ids.device
        batch.known[key] = AttentionWork.build(batch.spans, group, device, backward=backward)
    found: AttentionWork = batch.known[key]
    return found


# ------------------------------------------------------------------------------- LoRA


def add_lora(
    y: Tensor, x: Tensor, weight: Any, a: Sequence[Any], b: Sequence[Any]
) -> Sequence[Tensor]:
    """Add each token's own LoRA to the joined product of some linear operators."""
    lora = a[0]
    if not hasattr(lora, "a_rows"):
        return torch_ops.add_lora(y, x, weight, a, b)
    tiles = _tiles(lora.tokens.known, lora.tokens.spans, x)
    down, up = _matrices(lora)
    s = segmented_lora.shrink(x, down, tiles)
    segmented_lora.expand_add(y, s, up, tiles)
    sizes = weight.group_sizes
    return y.split(sizes, -1) if len(sizes) > 1 else (y,)


def _tiles(known: dict[Any, Any], spans: Sequence[tuple[int, int, int]], x: Tensor) -> TokenTiles:
    """Tokens by adapter, made once for all sites: first token, tokens and slot of each span."""
    if "tiles" not in known:
        adapters = len({slot for _, _, slot in spans})
        count = sum(length for _, length, _ in spans)
        block = DECODE_BLOCK if count <= DECODE_BLOCK * adapters else PREFILL_BLOCK
        known["tiles"] = token_tiles(spans, block).to(x.device)
    found: TokenTiles = known["tiles"]
    return found


def _matrices(lora: Any) -> tuple[RankRows, RankRows]:
    """A and B of the site, made once for as long as the tables lie where they are."""
    if "matrices" not in lora.known:
        count = len(lora.out_sizes)
        lora.known["matrices"] = (
            rank_rows(lora.memory, lora.a_rows, lora.ranks, (0,) * count, (lora.in_size,) * count),
            rank_rows(lora.memory, lora.b_rows, lora.ranks, lora.out_starts, lora.out_sizes),
        )
    found: tuple[RankRows, RankRows] = lora.known["matrices"]
    return found


# ------------------------------------------------------------------------------- bottlenecks


def shrink(x: Tensor, a: Any) -> Any:
    """s = x Aᵀ, each token by its own adapter; of rows as the segmented kernels have it."""
    if _is_trained(a):
        return trained_adapters.shrink(x, a)
    if not hasattr(a, "a_rows"):
        return torch_ops.shrink(x, a)
    down, _ = _matrices(a)
    return segmented_lora.shrink(x, down, _tiles(a.tokens.known, a.tokens.spans, x))


def activate(s: Any, bias: Any, function: str) -> Any:
    """σ(s + scale · bias) of a bottleneck; s and what comes out as `shrink` gives it."""
    if not hasattr(bias, "bias_rows"):
        return torch_ops.activate(s, bias, function)
    if "biases" not in bias.known:
        most = bias.bias_rows.shape[2]
        bias.known["biases"] = rank_rows(bias.memory, bias.bias_rows, bias.biases, (0,), (most,))
    tiles = _tiles(bias.tokens.known, bias.tokens.spans, s)
    return segmented_activate(s, bias.known["biases"], bias.ranks, tiles, function)


def expand_add(y: Tensor, s: Any, b: Any) -> Tensor:
    """y + scale · s Bᵀ, each token by its own adapter; may be written over y."""
    if _is_trained(b):
        return trained_adapters.expand_add(y, s, b)
    if not hasattr(b, "b_rows"):
        return torch_ops.expand_add(y, s, b)
    _, up = _matrices(b)
    return segmented_lora.expand_add(y, s, up, _tiles(b.tokens.known, b.tokens.spans, y))


def _is_trained(weight: Any) -> bool:
    """Whether it is that of the one adapter that is trained, or made of it."""
    if weight is None:  # no token of the batch has one
        return False
    return isinstance(weight, Tensor) or getattr(weight, "segments", weight) is None


# ------------------------------------------------------------------------------- vectors


def scale(y: Tensor, vector: Any, base: Tensor | None = None) -> Tensor:
    """vector ⊙ (y - base) + base, each token by its own adapter's vector."""
    if isinstance(vector, tuple):
        return reduce(lambda scaled, one: scale(scaled, one, base), vector, y)
    if not _is_stack(y, vector):
        return torch_ops.scale(y, vector, base)
    # What the base makes may be read elsewhere, too.
    return segmented_scale(y.clone(), *_vectors(y, vector), base)


def bias_add(y: Tensor, bias: Any, base: Tensor | None = None) -> Tensor:
    """y + bias, or y + (bias - base), each token with its own adapter's bias."""
    if isinstance(bias, tuple):
        return reduce(lambda total, one: bias_add(total, one, base), bias, y)
    if not _is_stack(y, bias):
        return torch_ops.bias_add(y, bias, base)
    return segmented_bias_add(y, *_vectors(y, bias), base)


def _is_stack(y: Tensor, vector: Any) -> bool:
    """Whether a vector is a stack of adapters' own, with rows that kernels can read."""
    segments = getattr(vector, "segments", None)
    return segments is not None and y.dim() == 2 and not y.shape[1] % ROW_ALIGNMENT


def _vectors(y: Tensor, vector: Any) -> tuple[RankRows, TokenTiles]:
    """The stack's vectors as rows, and the tokens by their places in it."""
    segments, (count, _, size) = vector.segments, vector.weight.shape
    key = ("vectors", vector.present, size)
    if key not in segments.known:
        rows = (size * torch.arange(count, device=y.device)).view(1, count, 1)
        ranks = int32_on([vector.present], y.device)
        segments.known[key] = rank_rows(vector.weight.view(-1), rows, ranks, (0,), (size,))
    starts = accumulate(segments.sizes[:-1], initial=segments.start)
    spans = list(zip(starts, segments.sizes, range(count), strict=True))
    rows = replace(segments.known[key], memory=vector.weight.view(-1))
    return rows, _tiles(segments.known, spans, y)

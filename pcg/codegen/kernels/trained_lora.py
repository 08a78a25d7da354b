"""LoRA in training by the segmented kernels: of one adapter, or of several jobs at once.

    s = x Aᵀ                   z = y + scale · s Bᵀ
    ds = scale · dz B          dB = scale · dzᵀ s          dA = dsᵀ x          dx = dz W + ds A

Adapters are fp32 over activations of 16 bits, which these read as they are: no tensor of tokens is
made in fp32 on the way. A parameter is its own memory of rows; B [out, r] is turned for that, and
those of several jobs are joined, which is little beside their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.codegen.kernels import torch_ops
from pcg.codegen.kernels.bypass_ops import as_weight
from pcg.codegen.kernels.products import Asking, Bypass, Part, product_backward
from pcg.codegen.kernels.templates import segmented_lora, segmented_lora_backward
from pcg.codegen.kernels.templates.rank_rows import ALIGNMENT, RankRows, int32_on, rank_rows
from pcg.codegen.kernels.templates.token_tiles import (
    DECODE_BLOCK,
    PREFILL_BLOCK,
    TokenTiles,
    token_tiles,
)

_MOST_RANK = 256
"""Up to here the kernels are meant for it; what is wider is a product like any other."""


def shrink(x: Tensor, a: Any) -> Tensor:
    """s = x Aᵀ, [T, r] in A's dtype."""
    matrix = as_weight(a).weight
    if not (_is_rows(x) and _is_matrix(matrix, x.shape[1])):
        return torch_ops.shrink(x, a)  # type: ignore[no-any-return]
    s = segmented_lora.shrink(x, rows_of([matrix]), segments_of([len(x)], x.device))
    return _of_rank(_whole(s), len(matrix)).contiguous()  # kept for backward


def expand_add(y: Tensor, s: Tensor, b: Any) -> Tensor:
    """y + scale · s Bᵀ, in y's dtype and memory of its own."""
    b = as_weight(b)
    if not (_is_rows(y) and _is_summand(s) and _is_matrix(b.weight.t(), y.shape[1])):
        return torch_ops.expand_add(y, s, b)
    up = rows_of([b.weight.t()])
    tiles = segments_of([len(y)], y.device)
    s = _as_places([s], up)
    return segmented_lora.expand_add(y, s, up, tiles, _scales((b.scale,), y.device), in_place=False)


def expand_backward(dz: Tensor, b: Any) -> Tensor:
    """ds = scale · dz B, [T, r] in B's dtype."""
    b = as_weight(b)
    if not (_is_rows(dz) and _is_matrix(b.weight.t(), dz.shape[1])):
        return torch_ops.expand_backward(dz, b)
    up, tiles = rows_of([b.weight.t()]), segments_of([len(dz)], dz.device)
    ds = segmented_lora_backward.expand_backward(dz, up, tiles, _scales((b.scale,), dz.device))
    return _of_rank(_whole(ds), b.weight.shape[1])


def outer(ds: Tensor, x: Tensor) -> Tensor:
    """dA = dsᵀ x, [r, in] in the dtype of ds."""
    if not (_is_rows(x) and _is_summand(ds)):
        return torch_ops.outer(ds, x)
    (gradient,) = _outers(ds.unsqueeze(0), x, [ds.shape[1]], segments_of([len(x)], x.device), None)
    return gradient


def scaled_outer(dz: Tensor, s: Tensor, b: Any) -> Tensor:
    """dB = scale · dzᵀ s, [out, r] in the dtype of s."""
    if not (_is_rows(dz) and _is_summand(s)):
        return torch_ops.scaled_outer(dz, s, b)
    tiles, scales = segments_of([len(dz)], dz.device), _scales((as_weight(b).scale,), dz.device)
    (gradient,) = _outers(s.unsqueeze(0), dz, [s.shape[1]], tiles, scales)
    return gradient.t().contiguous()


def lora_linear_backward(
    batch: Any, name: str, dz: Tensor, weight: Tensor, a: Any, b: Any, s: Tensor
) -> Asking:
    """Ask for the gradients of a linear operator with LoRA, without dA.

    Args:
        batch: whose tokens dz has.
        name: of the weight in its layer.
        dz: [T, out].
        weight: the base's, [out, in].
        a: the adapter's A [r, in].
        b: its B [out, r], and scale.
        s: x Aᵀ, [T, r].
    Returns:
        ds [T, r], dB [out, r], dx [T, in].
    """
    a, b = as_weight(a), as_weight(b)
    known = _is_rows(dz) and _is_summand(s) and not weight.shape[1] % ALIGNMENT
    known = known and _is_matrix(b.weight.t(), dz.shape[1])
    if known and _is_matrix(a.weight, weight.shape[1]):
        lora = LoraGradients(a, b, s)
        dx = yield from product_backward(batch, name, dz, weight, lora)
        return lora.ds, lora.db, dx
    ds, db = torch_ops.expand_backward(dz, b), torch_ops.scaled_outer(dz, s, b)
    dx = yield from product_backward(batch, name, dz, weight)
    return ds, db, dx.add_(torch_ops.shrink_backward(ds, a))


class LoraGradients(Bypass):
    """The gradients of one job's LoRA at a linear operator.

    Attributes:
        ds: [T, r], once it was run.
        db: [out, r], likewise.
    """

    def __init__(self, a: Any, b: Any, s: Tensor) -> None:
        self._a = a
        self._b = b
        self._s = s
        self.ds: Any = None
        self.db: Any = None

    def run(self, dz: Tensor, dx: Tensor, parts: Sequence[Part[LoraGradients]]) -> None:
        jobs = [part.bypass for part in parts]
        up = rows_of([job._b.weight.t() for job in jobs])
        down = rows_of([job._a.weight for job in jobs])
        tiles = _segments(tuple((part.start, part.count) for part in parts), dz.device)
        scales = _scales(tuple(job._b.scale for job in jobs), dz.device)
        ranks = [job._s.shape[1] for job in jobs]
        ds = _whole(segmented_lora_backward.expand_backward(dz, up, tiles, scales))
        s = _as_places([job._s for job in jobs], up)[0]
        gradients = _outers(s, dz, ranks, tiles, scales)
        segmented_lora_backward.shrink_backward(dx, ds.unsqueeze(0), down, tiles)
        of_job = ds[0].split([part.count for part in parts])
        for job, rank, own, gradient in zip(jobs, ranks, of_job, gradients, strict=True):
            job.ds, job.db = _of_rank(own.unsqueeze(0), rank), gradient.t().contiguous()


def _outers(
    s: Tensor, x: Tensor, ranks: Sequence[int], tiles: TokenTiles, scales: Tensor | None
) -> Sequence[Tensor]:
    """scale · Σ s ⊗ x of each segment, [r, columns] each; s is [1, places, ranks]."""
    memory = torch.empty((sum(ranks), x.shape[1]), dtype=torch.float32, device=x.device)
    gradients = replace(_layout(tuple(ranks), x.shape[1], x.shape[1], x.device), memory=memory)
    padded = _padded(s, gradients.most_rank).unsqueeze(0)
    segmented_lora_backward.segment_outer(padded, x, gradients, tiles, scales)
    own: Sequence[Tensor] = memory.split(list(ranks))
    return own


# ------------------------------------------------------------------------------- what kernels read


def is_column_wise(x: Tensor) -> bool:
    """Whether rows of x [T, n] can be loaded 16 bytes at once."""
    if x.dim() != 2 or x.stride(1) != 1 or not x.numel():
        return False
    return not (x.shape[1] % ALIGNMENT or x.stride(0) % ALIGNMENT or x.data_ptr() % 16)


def rows_of(matrices: Sequence[Tensor]) -> RankRows:
    """Matrices [r, n], each of a slot, as the rows of one memory; one of them as it lies."""
    size, ranks = matrices[0].shape[1], tuple(len(matrix) for matrix in matrices)
    if len(matrices) > 1:
        memory = torch.cat([*matrices])
    else:
        (memory,) = matrices
        if not is_column_wise(memory):
            memory = memory.contiguous()
    return replace(_layout(ranks, size, memory.stride(0), memory.device), memory=memory)


def segments_of(counts: Sequence[int], device: torch.device) -> TokenTiles:
    """Tokens one behind the other, so many of each slot."""
    starts = accumulate(counts[:-1], initial=0)
    return _segments(tuple(zip(starts, counts, strict=True)), device)


@lru_cache(maxsize=256)
def _segments(spans: tuple[tuple[int, int], ...], device: torch.device) -> TokenTiles:
    """First token and tokens of each slot."""
    count = sum(length for _, length in spans)
    block = DECODE_BLOCK if count <= DECODE_BLOCK * len(spans) else PREFILL_BLOCK
    numbered = [(start, length, slot) for slot, (start, length) in enumerate(spans)]
    return token_tiles(numbered, block).to(device)


@lru_cache(maxsize=256)
def _layout(ranks: tuple[int, ...], size: int, stride: int, device: torch.device) -> RankRows:
    """Matrices of these ranks, whose rows are `stride` elements apart in a memory."""
    most = -(-max(ranks) // 16) * 16
    rows = torch.zeros((1, len(ranks), most), dtype=torch.int64)
    for slot, first in enumerate(accumulate(ranks[:-1], initial=0)):
        rows[0, slot, : ranks[slot]] = stride * torch.arange(first, first + ranks[slot])
    there = int32_on([ranks], device)
    return rank_rows(torch.empty(0, device=device), rows.to(device), there, (0,), (size,))


@lru_cache(maxsize=256)
def _scales(scales: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([scales], dtype=torch.float32, device=device)


_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def _is_rows(x: Tensor) -> bool:
    return x.dtype in _HALF_OR_SINGLE and is_column_wise(x)


def _is_matrix(matrix: Tensor, columns: int) -> bool:
    is_known = matrix.dim() == 2 and matrix.shape[1] == columns
    return is_known and matrix.dtype == torch.float32 and 0 < len(matrix) <= _MOST_RANK


def _is_summand(s: Tensor) -> bool:
    return s.dim() == 2 and s.dtype == torch.float32 and 0 < s.shape[1] <= _MOST_RANK


def _whole(s: Tensor) -> Tensor:
    """The sum over the parts of `shrink`'s s of one slice, [1, places, ranks]."""
    return s[0] if len(s) == 1 else s.sum(0)


def _of_rank(s: Tensor, rank: int) -> Tensor:
    """[T, r] of one slice."""
    return s[0, :, :rank]


def _as_places(each: Sequence[Tensor], rows: RankRows) -> Tensor:
    """s [T, r] of each slot as the kernels read it, [1, 1, places, most_rank]."""
    padded = [_padded(s, rows.most_rank) for s in each]
    return (torch.cat(padded) if len(padded) > 1 else padded[0]).unsqueeze(0).unsqueeze(0)


def _padded(s: Tensor, ranks: int) -> Tensor:
    """s with zeros up to so many ranks."""
    missing = ranks - s.shape[-1]
    return F.pad(s, (0, missing)) if missing else s.contiguous()

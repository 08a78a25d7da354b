"""Products of mixtures of experts: rows in the order of the tokens, grouped by expert.

With a `part` a rank has an equal part of the experts; rows of other parts' experts are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.formats import native
from pcg.kernels.batch import ProgramBatch, Segments
from pcg.kernels.torch.lora import as_weight
from pcg.kernels.torch.products import linear, linear_backward
from pcg.kernels.torch.quantized import expert_matrices, native_experts
from pcg.native_library import check_unrecorded
from pcg.ranks.group import Ranks

Part: TypeAlias = tuple[int, int]
"""The index of a part of the experts, and the number of parts."""
WHOLE: Part = (0, 1)


def part_of_rank(ranks: Ranks, parts: int) -> Part:
    """Return a rank's part of the experts; ranks in a row share a part."""
    return ranks.rank * parts // ranks.size, parts


def expert_linear(
    x: Tensor,
    indices: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    part: Part = WHOLE,
) -> Tensor:
    """Return [T, k, out]: each token by its k experts; see the operator."""
    y = _new_rows(x, indices, weight.shape[1], part)
    groups = _groups(indices, weight.shape[0], part)
    if _is_multiplied(x, groups, weight, y):
        if bias is not None:
            chosen = indices.reshape(-1)[groups.order] - part[0] * len(bias)
            y[groups.order] += bias.flatten(1)[chosen]
        return y.view(*indices.shape, -1)
    matrices = expert_matrices(weight)
    for expert, places in groups:
        of_expert = None if bias is None else bias[expert].view(-1)
        y[places] = linear(_rows(x, indices, places), matrices[expert], of_expert)
    return y.view(*indices.shape, -1)


def routed_topk(batch: ProgramBatch, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of x [T, E] and their indices; those of a replay if there is any."""
    values, indices = torch.topk(x, k, dim=-1)
    if batch.routes is None:
        return values, indices
    chosen = batch.routes.chosen(batch.layer, indices)
    return x.gather(-1, chosen), chosen


_FEW_ROWS = 32
"""The most rows of an expert that the native kernel multiplies by float weights: for 1 to 32 it
needs 0.5 to 0.95 of the time of MKL, for 64 1.3 (benchmarks/generation.py)."""


def _new_rows(x: Tensor, indices: Tensor, size: int, part: Part) -> Tensor:
    """Return the memory of rows of all choices, [T k, size]: zeros if a rank computes some."""
    new = x.new_empty if part == WHOLE else x.new_zeros
    return new(indices.numel(), size)


def _is_multiplied(x: Tensor, groups: _Groups, weight: Tensor, y: Tensor) -> bool:
    """Write the products of all choices into y by the native kernel; return whether it can."""
    if weight.is_meta:
        matrices = native_experts(weight)
    elif native.reads(weight) and x.dtype is weight.dtype and not weight.requires_grad:
        few = len(y) <= _FEW_ROWS or max(groups.sizes) <= _FEW_ROWS
        matrices = _floats(weight) if few else None
    else:
        matrices = None
    if matrices is None or x.requires_grad:
        return False
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    return len(y) > 0 and matrices.multiply_chosen(rows, groups.order, groups.counts, y)


def _floats(weight: Tensor) -> native.Matrices:
    """Return float experts for the native kernel, which are kept with their tensor."""
    known: tuple[int, native.Matrices] | None = getattr(weight, "pcg_matrices", None)
    if known is None or known[0] != weight.data_ptr():
        known = weight.data_ptr(), native.Matrices.of_floats(weight)
        weight.pcg_matrices = known  # type: ignore[attr-defined]
    return known[1]


def expert_linear_backward(
    dy: Tensor, indices: Tensor, weight: Tensor, *, part: Part = WHOLE
) -> Tensor:
    """Return [T, k, in]: dy [T, k, out] by the transposed experts; see the operator."""
    dx, matrices = _new_rows(dy, indices, weight.shape[2], part), expert_matrices(weight)
    for expert, places in _groups(indices, weight.shape[0], part):
        dx[places] = linear_backward(_rows(dy, indices, places), matrices[expert])
    return dx.view(*indices.shape, -1)


def pack_rows(x: Tensor, indices: Tensor, *, experts: int, part: Part) -> Tensor:
    """Return the rows of x [T, k, n] of a rank's experts, [R, n], by expert."""
    return x.flatten(0, 1)[_groups(indices, experts, part).order]


def unpack_rows(rows: Tensor, indices: Tensor, *, experts: int, part: Part) -> Tensor:
    """Return packed rows at their places, [T, k, n], among zeros."""
    x = rows.new_zeros(indices.numel(), rows.shape[1])
    x[_groups(indices, experts, part).order] = rows
    return x.view(*indices.shape, -1)


# ------------------------------------------------------------------------------- LoRA on experts


def expert_shrink(x: Tensor, indices: Tensor, a: Any, *, experts: int, part: Part = WHOLE) -> Any:
    """Return A[e] x, [T, k, r], in A's dtype; in serving of the segments' tokens; see the operator.

    None if no token of the batch has an adapter at the site; a tuple for several widths.
    """
    if a is None:
        return None
    if isinstance(a, tuple):
        shrink = partial(expert_shrink, x, indices, experts=experts, part=part)
        return tuple(map(shrink, a))
    a = as_weight(a)
    x = x.to(a.weight.dtype)
    if a.segments is None:
        return expert_linear(x, indices, a.weight.unflatten(0, (experts, -1)), part=part)
    rows = x[a.segments.start : a.segments.stop]
    chosen = _of_adapters(indices, a.segments, experts * part[1])
    inner = a.weight[..., : _unpadded(a.weight.shape[2], experts)]
    return _by_adapters(rows, chosen, inner.unflatten(2, (-1, experts)), part)


def expert_expand_add(
    y: Tensor, s: Any, indices: Tensor, b: Any, *, experts: int, part: Part = WHOLE
) -> Tensor:
    """Return y + scale · B[e] s, [T, k, out], in y's dtype; may be written over y."""
    if s is None or b is None:
        return y
    if isinstance(b, tuple):
        for of_width, b_of_width in zip(s, b, strict=True):
            y = expert_expand_add(y, of_width, indices, b_of_width, experts=experts, part=part)
        return y
    b = as_weight(b)
    if b.segments is None:
        z = expert_linear(s, indices, _by_expert(b.weight, experts), part=part).mul_(b.scale)
        return z.add_(y).to(y.dtype)
    chosen = _of_adapters(indices, b.segments, experts * part[1])
    inner = b.weight[:, : _unpadded(b.weight.shape[1], experts)].unflatten(1, (-1, experts))
    y[b.segments.start : b.segments.stop] += _by_adapters(s, chosen, inner.transpose(2, 3), part)
    return y


def expert_shrink_backward(
    ds: Tensor, indices: Tensor, a: Any, *, experts: int, part: Part = WHOLE
) -> Tensor:
    """Return ds A[e], [T, k, in]."""
    weight = as_weight(a).weight.unflatten(0, (experts, -1))
    return expert_linear_backward(ds, indices, weight, part=part)


def expert_expand_backward(
    dz: Tensor, indices: Tensor, b: Any, *, experts: int, part: Part = WHOLE
) -> Tensor:
    """Return scale · dz B[e], [T, k, r], in B's dtype."""
    b = as_weight(b)
    dz, weight = dz.to(b.weight.dtype), _by_expert(b.weight, experts)
    return expert_linear_backward(dz, indices, weight, part=part).mul_(b.scale)


def expert_outer(
    ds: Tensor, indices: Tensor, x: Tensor, *, experts: int, part: Part = WHOLE
) -> Tensor:
    """Return dA [E r, in]: the sums of ds xᵀ over each expert's choices."""
    da = ds.new_zeros(experts, ds.shape[-1], x.shape[-1])
    for expert, places in _groups(indices, experts, part):
        # Without names, so that an expert's rows are freed before the next one's are taken.
        da[expert] = ds.flatten(0, 1)[places].t() @ _rows(x, indices, places).to(ds.dtype)
    return da.flatten(0, 1)


def expert_scaled_outer(
    dz: Tensor,
    indices: Tensor,
    s: Tensor,
    b: Any,
    *,
    experts: int,
    part: Part = WHOLE,
) -> Tensor:
    """Return dB [out, r E]: scale times the sums of dz sᵀ over each expert's choices."""
    db = s.new_zeros(experts, dz.shape[-1], s.shape[-1])
    for expert, places in _groups(indices, experts, part):
        db[expert] = dz.flatten(0, 1)[places].to(s.dtype).t() @ s.flatten(0, 1)[places]
    joined: Tensor = db.permute(1, 2, 0).flatten(1)
    return joined.mul_(as_weight(b).scale)


def _by_expert(b: Tensor, experts: int) -> Tensor:
    """View B [out, r E] as [E, out, r]."""
    by_rank: Tensor = b.unflatten(1, (-1, experts))
    return by_rank.permute(2, 0, 1)


def _by_adapters(x: Tensor, indices: Tensor, weight: Tensor, part: Part) -> Tensor:
    """Return [T, k, out]: each token by the experts that it chose of its adapter.

    Args:
        indices: choices among the experts of all adapters, an adapter after another.
        weight: [adapters, in, out, E], of a rank's E experts.
    """
    adapters, _, out, experts = weight.shape
    y, total = _new_rows(x, indices, out, part), experts * part[1]
    for place, choices in _groups(indices, adapters * total):
        adapter, expert = divmod(place, total)
        expert -= part[0] * experts
        if 0 <= expert < experts:
            y[choices] = _rows(x, indices, choices) @ weight[adapter, :, :, expert]
    return y.view(*indices.shape, -1)


def _unpadded(size: int, experts: int) -> int:
    """Return the size of a stack's ranks, of all experts together, without padding."""
    return size // experts * experts


def _of_adapters(indices: Tensor, segments: Segments, experts: int) -> Tensor:
    """Return the segments' choices among the experts of all adapters, an adapter after another."""
    before: tuple[Segments, Tensor] | None = getattr(indices, "pcg_adapters", None)
    if before is None or before[0] is not segments:
        sizes = torch.tensor(segments.sizes, device=indices.device)
        first = torch.arange(len(sizes), device=indices.device).mul_(experts)
        first = first.repeat_interleave(sizes, output_size=segments.stop - segments.start)
        before = segments, indices[segments.start : segments.stop] + first.unsqueeze(1)
        indices.pcg_adapters = before  # type: ignore[attr-defined]
    return before[1]


# ----------------------------------------------------------------------------------------- groups


def _rows(x: Tensor, indices: Tensor, places: Tensor) -> Tensor:
    """Return the rows of x [T, in] or [T, k, in] at some of the choices [T k]."""
    if x.dim() == 3:
        return x.flatten(0, 1)[places]
    return x[places // indices.shape[-1]]


@dataclass(frozen=True)
class _Groups:
    """Places of choices among [T k] in the order of their experts, and the number of each expert's.

    `counts` is [E], on the device, and `sizes` are the same numbers on the host.
    """

    order: Tensor
    counts: Tensor

    @cached_property
    def sizes(self) -> list[int]:
        check_unrecorded("the host reads numbers of rows of experts")
        sizes: list[int] = self.counts.tolist()
        return sizes

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each chosen expert, and the places of its choices."""
        for expert, places in enumerate(self.order.split(self.sizes)):
            if len(places):
                yield expert, places


def _groups(indices: Tensor, count: int, part: Part = WHOLE) -> _Groups:
    """Return the choices of a part's experts, of which there are `count`, by expert.

    The products of a mixture share the order of all choices: it is kept with the indices, which
    nobody writes.
    """
    groups: _Groups | None = getattr(indices, "pcg_groups", None)
    if groups is None:
        flat = indices.reshape(-1)
        counts = flat.new_zeros(count * part[1]).index_add_(0, flat, torch.ones_like(flat))
        groups = _Groups(flat.argsort(stable=True), counts)
        indices.pcg_groups = groups  # type: ignore[attr-defined]
    if part == WHOLE:
        return groups
    experts = slice(part[0] * count, (part[0] + 1) * count)
    start = sum(groups.sizes[: experts.start])
    stop = start + sum(groups.sizes[experts])
    return _Groups(groups.order[start:stop], groups.counts[experts])

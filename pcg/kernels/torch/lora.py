"""Products by low-rank adapters, each token by its own, and the matrices of LoRA's variants.

Shapes: T tokens, r rank. Weights are those of `pcg.kernels.batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import JoinedLora, LoraRun, ProgramBatch, Segments
from pcg.kernels.sgmv import add_lora_of_few
from pcg.kernels.torch.collectives import own_part
from pcg.kernels.torch.products import has_stand_in, is_remote, linear, stand_in_of
from pcg.peft.weights import AdapterWeight


def as_weight(weight: Any) -> Any:
    """Return an adapter's weight; a tensor that the program computed from several, as a weight."""
    return AdapterWeight(weight) if isinstance(weight, Tensor) else weight


def by_width(weights: Any) -> Sequence[Any]:
    """Return a site's weights, for each width of adapters that have any."""
    every = weights if isinstance(weights, tuple) else (weights,)
    return [weight for weight in every if weight is not None]


def shrink(x: Tensor, a: Any) -> Any:
    """Return s = x Aᵀ: [T, in] to [T, r], in A's dtype; each token by its adapter.

    None if no token of the batch has an adapter at the site; a tuple for several widths.
    """
    if a is None:
        return None
    if isinstance(a, tuple):
        return tuple(shrink(x, of_width) for of_width in a)
    a = as_weight(a)
    segments, weight = a.segments, a.weight
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    if segments is None:
        return F.linear(x, weight)
    x = x[segments.start : segments.stop]
    if segments.is_batched:
        # It stays [adapters, tokens, r].
        return _products(x.view(weight.shape[0], segments.size, -1), weight)
    return _segmented_product(x, weight, segments)


def embedding_shrink(ids: Tensor, a: Any, *, by_row: bool = False) -> Any:
    """Return s = A[:, ids]ᵀ: [T] to [T, r]; each token by its adapter, as `shrink`.

    With `by_row`, which training has alone, A is [V, r].
    """
    if a is None:
        return None
    if isinstance(a, tuple):
        return tuple(embedding_shrink(ids, of_width) for of_width in a)
    segments, weight = a.segments, a.weight
    if segments is None:
        return F.embedding(ids, weight if by_row else weight.t())
    ids, count = ids[segments.start : segments.stop], weight.shape[0]
    adapters = torch.arange(count, device=ids.device)
    if segments.is_batched:
        return weight[adapters.unsqueeze(1), ids.view(count, segments.size)]
    sizes = torch.tensor(segments.sizes, device=ids.device)
    return weight[adapters.repeat_interleave(sizes, output_size=len(ids)), ids]


def expand_add(y: Tensor, s: Any, b: Any) -> Tensor:
    """Return y + scale · s Bᵀ: [T, out], in y's dtype; may be written over y."""
    if s is None or b is None:
        return y
    if isinstance(b, tuple):
        for of_width, b_of_width in zip(s, b, strict=True):
            y = expand_add(y, of_width, b_of_width)
        return y
    b = as_weight(b)
    segments, weight = b.segments, b.weight
    if segments is None:
        if y.dtype == s.dtype:
            return torch.addmm(y, s, weight.t(), alpha=b.scale)
        return y.to(s.dtype).addmm_(s, weight.t(), alpha=b.scale).to(y.dtype)
    rows = y[segments.start : segments.stop]
    if not segments.is_batched:
        rows.add_(_segmented_product(s, weight, segments))
    elif y.dtype == s.dtype:
        rows.view(weight.shape[0], segments.size, -1).baddbmm_(s, weight)
    else:
        rows.view(weight.shape[0], segments.size, -1).add_(torch.bmm(s, weight))
    return y


def expand_add_part(y: Tensor, s: Any, b: Any, batch: ProgramBatch) -> Tensor:
    """Return y + scale · s Bᵀ in the rank's columns, those of its rows of B: [T, out]."""
    if s is None or b is None:
        return y
    part = expand_add(own_part(y, -1, batch).contiguous(), s, b)
    z = y.clone()
    own_part(z, -1, batch).copy_(part)
    return z


def _segmented_product(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """Multiply each segment's rows by its matrix: [T, k] by [n, k, m] to [T, m]."""
    out = x.new_empty((x.shape[0], weight.shape[2]))
    if segments.gathered is not None:
        gather, tokens, places = segments.gathered
        rows = x[gather].view(weight.shape[0], segments.size, -1)
        out.index_copy_(0, tokens, _products(rows, weight).flatten(0, 1)[places])
    for i, first, end in segments.loose:
        torch.mm(x[first:end], weight[i], out=out[first:end])
    return out


def shrink_backward(ds: Tensor, a: Any) -> Tensor:
    """dx = ds A."""
    dx: Tensor = ds @ as_weight(a).weight
    return dx


def expand_backward(dz: Tensor, b: Any) -> Tensor:
    """ds = scale · dz B, in B's dtype."""
    b = as_weight(b)
    ds: Tensor = dz.to(b.weight.dtype) @ b.weight
    return ds.mul_(b.scale)


def outer(ds: Tensor, x: Tensor) -> Tensor:
    """dA = dsᵀ x."""
    return ds.t() @ x.to(ds.dtype)


def embedding_outer(
    ds: Tensor, ids: Tensor, a: AdapterWeight, padding: int, *, by_row: bool = False
) -> Tensor:
    """dA of embedding_shrink, of A's shape; 0 for the id of padding, if that is not -1."""
    size = a.weight.shape[0 if by_row else 1]
    rows: Tensor = torch.ops.aten.embedding_dense_backward(ds, ids, size, padding, False)
    return rows if by_row else rows.t()


def scaled_outer(dz: Tensor, s: Tensor, b: Any) -> Tensor:
    """dB = scale · dzᵀ s."""
    return (dz.to(s.dtype).t() @ s).mul_(as_weight(b).scale)


# ------------------------------------------------------------------------- serving: joined LoRA


def lora_linear(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    a: Sequence[Any],
    b: Sequence[Any],
) -> Sequence[Tensor]:
    """Apply linear operators to x with each token's LoRA; `a[0]` holds the LoRA of all."""
    first: Any = weights[0]
    return add_lora(linear(x, first, first.group_bias), x, first, a, b)


def add_lora(
    y: Tensor, x: Tensor, weight: Any, a: Sequence[Any], b: Sequence[Any]
) -> Sequence[Tensor]:
    """Add each token's LoRA to the joined product of some linear operators.

    Args:
        y: the product of x by the base's weights, [T, outs]; written over.
        x: [T, in].
        weight: the base's weight, joined.
        a: each output's A; the first holds the LoRA of all, a `JoinedLora`.
        b: each output's B, likewise.
    """
    for lora in add_lora_of_few(y, x, by_width(a[0])):
        _add_joined(y, x, lora)
    sizes = weight.group_sizes
    return y.split(sizes, -1) if len(sizes) > 1 else (y,)


def _add_joined(y: Tensor, x: Tensor, lora: JoinedLora) -> None:
    segments = lora.segments
    x, y = x[segments.start : segments.stop], y[segments.start : segments.stop]
    if lora.columns < y.shape[1]:
        y = y.narrow(1, lora.column, lora.columns)
    # Copies in bf16 are widened, so that nothing else is rounded.
    x = x.to(torch.promote_types(lora.a.dtype, torch.float32))
    if segments.is_batched:
        a = lora.a.to(x.dtype).transpose(1, 2)
        s = _products(x.view(lora.a.shape[0], segments.size, -1), a)
        for run in _runs(lora, len(y)):
            _add_batched(y, s, run)
    elif segments.gathered is not None:
        gather, tokens, places = segments.gathered
        rows = x[gather].view(lora.a.shape[0], segments.size, -1)
        s = _products(rows, lora.a.to(x.dtype).transpose(1, 2))
        z = y.new_zeros((gather.shape[0], y.shape[1]))
        for run in _runs(lora, len(z)):
            _add_batched(z, s, run)
        y.index_add_(0, tokens, z[places])
    for i, first, end in segments.loose:
        s = F.linear(x[first:end], lora.a[i].to(x.dtype))
        for run in _runs(lora, end - first):
            _add_loose(y[first:end], s, run, i)


def _runs(lora: JoinedLora, tokens: int) -> Sequence[LoraRun]:
    return lora.runs if tokens <= _FEW_ROWS else lora.parts


_FEW_ROWS = 32
"""Up to here one product is faster, of hidden 512 and ranks of 16 on a CPU; for 256 tokens parts
take 0.65 to 0.85 as long."""


def _add_batched(y: Tensor, s: Tensor, run: LoraRun) -> None:
    """Add s [adapters, size, ranks] times a run's B to y [adapters · size, outs]."""
    adapters, count, out, rank = run.b.shape
    size = s.shape[1]
    b = run.b.flatten(0, 1).transpose(1, 2).to(s.dtype)
    if not run.is_whole:
        y = y[:, run.column : run.column + count * out]
        s = s[..., run.row : run.row + count * rank]
    if y.dtype == s.dtype and count == 1:
        # Added where the outputs lie.
        y.view(adapters, size, out).baddbmm_(s, b)
        return
    if y.dtype == s.dtype and run.is_whole and size == 1 and y.is_contiguous():
        y.view(adapters * count, 1, out).baddbmm_(s.view(adapters * count, 1, rank), b)
        return
    factors = s.unflatten(-1, (count, rank)).transpose(1, 2)
    z = _products(factors.reshape(adapters * count, size, rank), b)
    columns = y.view(adapters, size, count, out)
    columns.add_(z.view(adapters, count, size, out).transpose(1, 2))


def _add_loose(y: Tensor, s: Tensor, run: LoraRun, adapter: int) -> None:
    """Add s [n, ranks] times an adapter's B of a run to y [n, outs]."""
    _, count, out, rank = run.b.shape
    for i in range(count):
        column, row = run.column + i * out, run.row + i * rank
        columns, rows = y[:, column : column + out], s[:, row : row + rank]
        b = run.b[adapter, i].to(s.dtype)
        if y.dtype == s.dtype:
            columns.addmm_(rows, b.t())
        else:
            columns.add_(F.linear(rows, b))


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [n, size, in] by weight [n, in, out], a transposed view: [n, size, out]."""
    n, size, in_ = x.shape
    if size == 1 and in_ > weight.shape[2]:
        # CPUs read a matrix of few rows twice as fast from the left.
        return torch.bmm(weight.transpose(1, 2), x.transpose(1, 2)).view(n, 1, -1)
    return torch.bmm(x, weight)


def column_norm(weight: Tensor, a: AdapterWeight, b: AdapterWeight) -> Tensor:
    """||W + scale · B A|| of each output, [out], in A's dtype."""
    if is_remote(weight):
        return stand_in_of(weight).adapted_lengths(a.weight, b.weight, b.scale)
    if b.weight.device.type != "cpu" or b.weight.is_inference() or a.weight.is_inference():
        return _column_norm(weight, a, b)  # a recorded step has to compute it each time
    # All windows of a pass have the same norm, which takes as long as 100 tokens of a layer.
    place = stand_in_of(weight) if has_stand_in(weight) else weight.data_ptr()
    places = place, a.weight.data_ptr(), b.weight.data_ptr()
    of = (*places, a.weight._version, b.weight._version, b.scale)
    kept: tuple[object, Tensor] | None = getattr(b.weight, "column_norm", None)
    if kept is None or kept[0] != of:
        kept = of, _column_norm(weight, a, b)
        b.weight.column_norm = kept  # type: ignore[attr-defined]
    return kept[1]


def _column_norm(weight: Tensor, a: AdapterWeight, b: AdapterWeight) -> Tensor:
    if has_stand_in(weight):
        return stand_in_of(weight).adapted_lengths(a.weight, b.weight, b.scale)
    norm: Tensor = torch.linalg.vector_norm(_adapted(weight, a, b), dim=1)
    return norm


def _adapted(weight: Tensor, a: AdapterWeight, b: AdapterWeight) -> Tensor:
    """Return W + scale · B A in A's dtype: the only new tensor of the weight's size."""
    if weight.dtype == a.weight.dtype:
        return torch.addmm(weight, b.weight, a.weight, alpha=b.scale)
    return weight.to(a.weight.dtype).addmm_(b.weight, a.weight, alpha=b.scale)


def column_norm_part(
    weight: Tensor, a: AdapterWeight, b: AdapterWeight, batch: ProgramBatch
) -> Tensor:
    """||W + scale · B A|| where each rank has columns of the weight, and of A."""
    return batch.ranks.all_reduce(_adapted(weight, a, b).square_().sum(1)).sqrt()


def column_factor(magnitude: AdapterWeight, norm: Tensor) -> Tensor:
    """The magnitude in units of the length, [out]."""
    return magnitude.weight / norm


def vera_down(shared: AdapterWeight, size: int) -> Tensor:
    """A site's A [r, in]: the shared matrix's first columns."""
    return shared.weight[:, :size]


def vera_up(shared: AdapterWeight, lambda_b: AdapterWeight, lambda_d: AdapterWeight) -> Tensor:
    """A site's B [out, r]: the shared matrix's first rows, λ_b ⊙ B ⊙ λ_d."""
    b: Tensor = shared.weight[: len(lambda_b.weight)] * lambda_d.weight
    return b.mul_(lambda_b.weight.unsqueeze(-1))


def vera_up_backward(
    gradient: Tensor, shared: AdapterWeight, lambda_b: AdapterWeight, lambda_d: AdapterWeight
) -> tuple[Tensor, Tensor]:
    """dλ_b [out] and dλ_d [r] of vera_up."""
    product = gradient * shared.weight[: len(lambda_b.weight)]
    return product @ lambda_d.weight, lambda_b.weight @ product


def singular_down(a: AdapterWeight, e: AdapterWeight) -> Tensor:
    """E ⊙ A, [r, in]."""
    return a.weight * e.weight


def singular_down_backward(
    gradient: Tensor, a: AdapterWeight, e: AdapterWeight
) -> tuple[Tensor, Tensor]:
    """dA [r, in] and dE [r, 1] of singular_down."""
    return gradient * e.weight, (gradient * a.weight).sum(1, keepdim=True)


def khatri_rao(p: AdapterWeight, q: AdapterWeight, dim: int) -> Tensor:
    """scale · P_j ⊙ Q_k of each pair of rows [r, n] (dim -2) or columns [n, r] (dim -1)."""
    pairs: Tensor = p.weight.unsqueeze(dim) * q.weight.unsqueeze(dim - 1)
    return pairs.flatten(dim - 1, dim).mul_(p.scale * q.scale)


def khatri_rao_backward(
    gradient: Tensor, p: AdapterWeight, q: AdapterWeight, dim: int
) -> tuple[Tensor, Tensor]:
    """dP and dQ of khatri_rao, of their shapes."""
    pairs = gradient.unflatten(dim, (p.weight.shape[dim], q.weight.shape[dim]))
    equation = "jkn,kn->jn jkn,jn->kn" if dim == -2 else "njk,nk->nj njk,nj->nk"
    scale, (of_p, of_q) = p.scale * q.scale, equation.split()
    dp, dq = torch.einsum(of_p, pairs, q.weight), torch.einsum(of_q, pairs, p.weight)
    return dp.mul_(scale), dq.mul_(scale)

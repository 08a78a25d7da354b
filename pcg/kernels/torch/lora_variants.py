"""LoRA's variants: DoRA's norms, VeRA's matrices, AdaLoRA's singular values, LoHa's pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.remote_weights import is_remote, remote_of
from pcg.peft.weights import AdapterWeight


def column_norm(weight: Tensor, a: AdapterWeight, b: AdapterWeight) -> Tensor:
    """||W + scale · B A|| of each output, [out], in A's dtype."""
    if is_remote(weight):
        return remote_of(weight).adapted_lengths(a.weight, b.weight, b.scale)
    if b.weight.device.type != "cpu" or b.weight.is_inference() or a.weight.is_inference():
        return _column_norm(weight, a, b)  # a recorded step has to compute it each time
    # All windows of a pass have the same norm, which takes as long as 100 tokens of a layer.
    places = [one.data_ptr() for one in (weight, a.weight, b.weight)]
    of = (*places, a.weight._version, b.weight._version, b.scale)
    kept: tuple[object, Tensor] | None = getattr(b.weight, "column_norm", None)
    if kept is None or kept[0] != of:
        kept = of, _column_norm(weight, a, b)
        b.weight.column_norm = kept  # type: ignore[attr-defined]
    return kept[1]


def _column_norm(weight: Tensor, a: AdapterWeight, b: AdapterWeight) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(_adapted(weight, a, b), dim=1)
    return norm


def _adapted(weight: Tensor, a: AdapterWeight, b: AdapterWeight) -> Tensor:
    """W + scale · B A in A's dtype: the only tensor of the weight's size that is made."""
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

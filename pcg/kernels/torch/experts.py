"""Products of mixtures of experts: rows in the order of the tokens, grouped by expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_linear(x: Tensor, indices: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [T, k, out]: each token by its k experts; see the operator."""
    y = x.new_empty(indices.numel(), weight.shape[1])
    for expert, places in _chosen(indices, weight.shape[0]):
        of_expert = None if bias is None else bias[expert].view(-1)
        y[places] = F.linear(_rows(x, indices, places), weight[expert], of_expert)
    return y.view(*indices.shape, -1)


def expert_linear_backward(dy: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """Return [T, k, in]: dy [T, k, out] by the transposed experts; see the operator."""
    dx = dy.new_empty(indices.numel(), weight.shape[2])
    for expert, places in _chosen(indices, weight.shape[0]):
        dx[places] = _rows(dy, indices, places) @ weight[expert]
    return dx.view(*indices.shape, -1)


def _rows(x: Tensor, indices: Tensor, places: Tensor) -> Tensor:
    """Return the rows of x [T, in] or [T, k, in] at some of the choices [T k]."""
    if x.dim() == 3:
        return x.flatten(0, 1)[places]
    return x[places // indices.shape[-1]]


def _chosen(indices: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each chosen expert, and the places of its choices among [T k]."""
    order, counts = _groups(indices, count)
    for expert, places in enumerate(order.split(counts)):
        if len(places):
            yield expert, places


def _groups(indices: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """Return the choices [T k] in the order of their experts, and the number of each expert's.

    The products of a mixture share them: they are kept with the indices, which nobody writes.
    """
    groups: tuple[Tensor, list[int]] | None = getattr(indices, "pcg_groups", None)
    if groups is None:
        flat = indices.reshape(-1)
        counts = torch.bincount(flat, minlength=count).tolist()
        groups = flat.argsort(stable=True), counts
        indices.pcg_groups = groups  # type: ignore[attr-defined]
    return groups

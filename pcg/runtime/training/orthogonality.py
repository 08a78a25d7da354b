"""The loss that draws AdaLoRA's matrices towards orthogonal rows, of pieces that ranks hold.

With P = A or Bᵀ [r, m] of each of n matrices, G = P Pᵀ and ||·|| the Frobenius norm,

    R = weight / n · Σ ||G - I||                                               (§3.1, eq. 4)
    ∂R/∂P = weight / n · 2 (G - I) P / ||G - I||                               0 where G = I

Of pieces P_i of m's entries, G is the sum of P_i P_iᵀ over pieces and ranks, in one message of r²
numbers a matrix; each rank then has its part of the gradient by its own P_i. Rows that ranks have
parts of are gathered before.

Source: "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning" (Zhang et al. 2023);
`AdaLoraModel.forward` of peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.runtime.adapters.adapter_shards import AdapterShards


def add_orthogonality(
    pieces: AdapterShards, names: Sequence[str], rank_dims: Sequence[int], weight: float
) -> float:
    """Add R's gradient to that of each piece, which is summed over the ranks already.

    Args:
        pieces: of the adapter; all ranks call this.
        names: of the pieces of A and B.
        rank_dims: of each, the dim that the triplets are along.
        weight: of the loss.
    Returns:
        R.
    """
    dims = dict(zip(names, rank_dims, strict=True))
    parts = {name: pieces.tensors[name].detach() for name in names}
    of_rows = [name for name in names if pieces.parted_dim(name) == dims[name]]
    for name, found in pieces.gathered({name: parts[name] for name in of_rows}).items():
        parts[name] = torch.cat(found, dims[name])
    rows = {name: part if dims[name] == 0 else part.t() for name, part in parts.items()}

    grams: dict[str, Tensor] = {}
    for name, p in rows.items():
        counts = pieces.is_first or pieces.parted_dim(name) not in (None, dims[name])
        gram = p @ p.t() if counts else p.new_zeros(len(p), len(p))
        path = pieces.path_of(name)
        grams[path] = grams[path] + gram if path in grams else gram

    total = 0.0
    each = weight / len(grams)
    slopes = {}
    for path, gram in zip(grams, pieces.summed([*grams.values()]), strict=True):
        difference = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        distance = torch.linalg.matrix_norm(difference)
        total += each * float(distance)
        smallest = torch.finfo(gram.dtype).tiny
        slopes[path] = 2 * each * difference / distance.clamp_min(smallest)
    for name, p in rows.items():
        start, stop = pieces.ranges(name)[dims[name]]
        gradient = slopes[pieces.path_of(name)][start:stop] @ p
        gradient = gradient if dims[name] == 0 else gradient.t()
        tensor = pieces.tensors[name]
        tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
    return total

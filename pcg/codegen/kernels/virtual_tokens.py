"""The functions of virtual tokens, on any device.

Shapes and what an adapter's weight is: `torch_ops`, through which emitted programs call these. A
batch has `virtual_rows` [v], its rows that are virtual, and `virtual_places` [v], which virtual
token of its adapter each one is; None where no row is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def virtual_tokens(batch: Any, x: Tensor, prompt: Any) -> Tensor:
    """x with each virtual row's embedding, in x's dtype, of its own adapter's prompt.

    Args:
        batch: its virtual rows.
        x: [T, h].
        prompt: [n, h], or a stack [adapters, n, h] with segments, which may be padded; None where
            no adapter of the batch has one.
    """
    rows, places = batch.virtual_rows, batch.virtual_places
    if prompt is None or rows is None:
        return x
    if prompt.segments is None:
        embeddings = prompt.weight[places]
    else:
        sizes = torch.tensor(prompt.segments.sizes, device=x.device)
        ends = sizes.cumsum(0) + prompt.segments.start
        embeddings = prompt.weight[torch.searchsorted(ends, rows, right=True), places]
    return x.index_copy(0, rows, embeddings.to(x.dtype))


def without_virtual(batch: Any, x: Tensor) -> Tensor:
    """x [T, h] with zeros in each virtual row."""
    return x if batch.virtual_rows is None else x.index_fill(0, batch.virtual_rows, 0.0)


def virtual_tokens_backward(batch: Any, dy: Tensor, prompt: Any) -> Tensor:
    """For each virtual token the sum of dy [T, h] over its rows: [n, h] in the prompt's dtype."""
    weight: Tensor = prompt.weight
    total = torch.zeros_like(weight)
    if batch.virtual_rows is None:
        return total
    return total.index_add_(0, batch.virtual_places, dy[batch.virtual_rows].to(weight.dtype))

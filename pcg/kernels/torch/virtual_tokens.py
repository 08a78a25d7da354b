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
    """x with its own adapter's prompt, in x's dtype, in each virtual row.

    Args:
        batch: its virtual rows.
        x: [T, …], of h features.
        prompt: [n, h], or a stack [adapters, n, h] with segments, which may be padded; None where
            no adapter of the batch has one.
    """
    rows, places = batch.virtual_rows, batch.virtual_places
    if prompt is None or rows is None:
        return x
    if isinstance(prompt, tuple):
        for one in prompt:
            x = virtual_tokens(batch, x, one)
        return x
    if prompt.segments is None:
        own = prompt.weight[places]
    else:
        segments = prompt.segments
        ends = torch.tensor(segments.sizes, device=x.device).cumsum(0) + segments.start
        # Rows of others count for the first or the last adapter, until they are left out.
        adapters = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        have = torch.tensor(prompt.present, device=x.device)[adapters]
        have &= (rows >= segments.start) & (rows < segments.stop)
        rows, places, adapters = rows[have], places[have], adapters[have]
        own = prompt.weight[adapters, places]
    return x.index_copy(0, rows, own.to(x.dtype).view(-1, *x.shape[1:]))


def without_virtual(batch: Any, x: Tensor) -> Tensor:
    """x [T, …] with zeros in each virtual row."""
    return x if batch.virtual_rows is None else x.index_fill(0, batch.virtual_rows, 0.0)


def virtual_tokens_backward(batch: Any, dy: Tensor, prompt: Any) -> Tensor:
    """For each virtual token the sum of dy [T, …] over its rows: [n, h] in the prompt's dtype."""
    weight: Tensor = prompt.weight
    total = torch.zeros_like(weight)
    if batch.virtual_rows is None:
        return total
    return total.index_add_(
        0, batch.virtual_places, dy[batch.virtual_rows].flatten(1).to(weight.dtype)
    )

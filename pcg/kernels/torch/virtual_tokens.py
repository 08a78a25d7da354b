"""Virtual tokens: rows of a batch that hold an adapter's prompt instead of a token's embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.lora import by_width


def virtual_tokens(batch: ProgramBatch, x: Tensor, prompt: Any) -> Tensor:
    """x with its own adapter's prompt, in x's dtype, in each virtual row.

    x is [T, …] of h features; the prompt is [n, h], or a stack [adapters, n, h] with segments,
    which may be padded, or None where no adapter of the batch has one.
    """
    for one in by_width(prompt):
        x = _with_prompt(batch, x, one)
    return x


def _with_prompt(batch: ProgramBatch, x: Tensor, prompt: Any) -> Tensor:
    rows, places = batch.virtual_rows, batch.virtual_places
    if rows is None or places is None:
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


def without_virtual(batch: ProgramBatch, x: Tensor) -> Tensor:
    """x [T, …] with zeros in each virtual row."""
    return x if batch.virtual_rows is None else x.index_fill(0, batch.virtual_rows, 0.0)


def virtual_tokens_backward(batch: ProgramBatch, dy: Tensor, prompt: Any) -> Tensor:
    """For each virtual token the sum of dy [T, …] over its rows: [n, h] in the prompt's dtype."""
    weight: Tensor = prompt.weight
    total = torch.zeros_like(weight)
    rows, places = batch.virtual_rows, batch.virtual_places
    if rows is None or places is None:
        return total
    return total.index_add_(0, places, dy[rows].flatten(1).to(weight.dtype))

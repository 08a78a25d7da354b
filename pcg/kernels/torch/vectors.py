"""Vectors that adapters scale by or add, each token by its own, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcg.ir.operators.vectors import INNER_TOKENS
from pcg.kernels.torch.lora import by_width
from pcg.kernels.torch.norms import widened


def scale(y: Tensor, vector: Any, base: Tensor | None = None) -> Tensor:
    """vector ⊙ (y - base) + base, each token by its own adapter's vector; y where there is none.

    The vector is [n], the program's own or one adapter's, or a stack [adapters, 1, n] with
    segments. y [T, n] is not written over, as it may be read elsewhere.
    """
    for one in by_width(vector):
        y = _scale(y, one, base)
    return y


def _scale(y: Tensor, vector: Any, base: Tensor | None) -> Tensor:
    weight: Tensor = vector if isinstance(vector, Tensor) else vector.weight
    segments = None if isinstance(vector, Tensor) else vector.segments
    if segments is None:
        return _scaled(y, weight, base)
    rows = y[segments.start : segments.stop]
    if segments.is_batched:
        by_adapter = rows.view(weight.shape[0], segments.size, -1)
        scaled = _scaled(by_adapter, weight, base).view(rows.shape)
    else:
        sizes = torch.tensor(segments.sizes, device=y.device)
        scaled = _scaled(rows, weight[:, 0].repeat_interleave(sizes, 0), base)
    if rows.shape[0] == y.shape[0]:
        return scaled
    return torch.cat((y[: segments.start], scaled, y[segments.stop :]))


def _scaled(y: Tensor, vector: Tensor, base: Tensor | None) -> Tensor:
    wide = y.to(torch.promote_types(y.dtype, vector.dtype))
    if base is not None:
        return torch.addcmul(base.to(wide.dtype), wide - base, vector).to(y.dtype)
    return y * vector if wide is y else wide.mul_(vector).to(y.dtype)


def inner(left: Tensor, right: Tensor, base: Tensor | None = None) -> Tensor:
    """The sum over tokens of left ⊙ (right - base), [n], in fp32 at least."""
    total = left.new_zeros(left.shape[1:], dtype=torch.promote_types(left.dtype, torch.float32))
    for own, other in zip(left.split(INNER_TOKENS), right.split(INNER_TOKENS), strict=True):
        if base is not None:
            other = other - base
        total += (own.to(total.dtype) * other.to(total.dtype)).sum(0)
    return total


def bias_add(y: Tensor, bias: Any, base: Tensor | None = None) -> Tensor:
    """y + scale · bias, or y + (bias - base), each token with its own adapter's bias."""
    for one in by_width(bias):
        y = _bias_add(y, one, base)
    return y


def _bias_add(y: Tensor, bias: Any, base: Tensor | None) -> Tensor:
    if bias.segments is None:
        delta: Tensor = bias.weight * bias.scale if base is None else bias.weight - base
        return (y + delta).to(y.dtype)
    delta = bias.weight[:, 0]  # scaled; zeros for adapters without one
    if base is not None:
        delta = (delta - base) * torch.tensor(bias.present, device=y.device).unsqueeze(-1)
    sizes = torch.tensor(bias.segments.sizes, device=y.device)
    rows = y[bias.segments.start : bias.segments.stop]
    rows.copy_(rows + delta.repeat_interleave(sizes, 0))
    return y


def sum_tokens(dz: Tensor, bias: Any = None) -> Tensor:
    """The sum over tokens, in fp32 at least; scaled as a bias is."""
    total = widened(dz).sum(0)
    return total if bias is None else total.mul_(bias.scale)

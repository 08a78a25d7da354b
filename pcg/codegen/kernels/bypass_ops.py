"""The functions of bypass networks other than LoRA's products, on any device.

Shapes and what an adapter's weight is: `torch_ops`, through which emitted programs call these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dropout(batch: Any, x: Tensor, p: float, key: int) -> Tensor:
    """x · mask / (1 - p), the mask drawn anew for each step, layer and key; x where not training.

    Args:
        batch: its `generator(key)` is None where the batch is not trained on.
        x: [T, n].
        p: probability that an element is dropped.
        key: of the dropout in its layer.
    """
    generator = batch.generator(key)
    if generator is None:
        return x
    if p == 1.0:
        return torch.zeros_like(x)
    mask = torch.empty_like(x).bernoulli_(1.0 - p, generator=generator)
    return mask.div_(1.0 - p).mul_(x)


def scale(y: Tensor, vector: Any) -> Tensor:
    """vector ⊙ y, each token by its own adapter's vector, in y's dtype; y where there is none.

    Args:
        y: [T, n]; not written over, as the base may read it elsewhere.
        vector: [n], or a stack [adapters, 1, n] with segments.
    """
    if vector is None:
        return y
    segments = vector.segments
    weight: Tensor = vector.weight
    if segments is None:
        return (y * weight).to(y.dtype)
    if segments.batched is not None:
        return (y.view(segments.batched) * weight).to(y.dtype).view(y.shape)
    rows = y[segments.start :]
    if len(segments.sizes) == 1:
        scaled = rows * weight[0]
    else:
        sizes = torch.tensor(segments.sizes, device=y.device)
        scaled = rows * weight[:, 0].repeat_interleave(sizes, 0)
    return torch.cat((y[: segments.start], scaled.to(y.dtype)))


def inner(left: Tensor, right: Tensor) -> Tensor:
    """The sum over tokens of left ⊙ right, [n], in fp32 at least."""
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    return (left.to(wide) * right.to(wide)).sum(0)

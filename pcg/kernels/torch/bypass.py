"""Dropout, and the activation of bottleneck adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import ProgramBatch


def dropout(batch: ProgramBatch, x: Tensor, p: float, key: int) -> Tensor:
    """x · mask / (1 - p), drawn anew for each step, layer and key; x where not training."""
    parts = list(batch.dropped_parts(key))
    if not parts:
        return x
    if p == 1.0:
        return torch.zeros_like(x)
    mask = x.new_empty(sum(part.count for part in parts), *x.shape[1:])
    for part in parts:
        own = mask[part.start : part.start + part.count]
        if part.count == part.whole:
            own.bernoulli_(1.0 - p, generator=part.generator)
        else:
            block = x.new_empty(part.whole, *x.shape[1:])
            block.bernoulli_(1.0 - p, generator=part.generator)
            own.copy_(block[part.skipped :][: part.count])
            del block  # before the next one is there
    if batch.chosen is not None:
        mask = mask[batch.chosen]
    return mask.div_(1.0 - p).mul_(x)


def activate(s: Any, bias: Any, function: str) -> Any:
    """σ(s + scale · bias) of a bottleneck; s and what comes out are as `shrink` gives them.

    The bias is [size], or a stack [adapters, 1, size] with segments, scaled already.
    """
    if s is None:
        return None
    if isinstance(s, tuple):
        return tuple(activate(own, one, function) for own, one in zip(s, bias, strict=True))
    segments = bias.segments
    if segments is None:
        return _FUNCTIONS[function](s + bias.weight * bias.scale)
    if segments.is_batched:
        return _FUNCTIONS[function](s + bias.weight)
    sizes = torch.tensor(segments.sizes, device=s.device)
    return _FUNCTIONS[function](s + bias.weight[:, 0].repeat_interleave(sizes, 0))


_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

"""The functions of bypass networks other than LoRA's products, on any device.

Shapes and what an adapter's weight is: `torch_ops`, through which emitted programs call these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.peft.weights import AdapterWeight


def dropout(batch: Any, x: Tensor, p: float, key: int) -> Tensor:
    """x · mask / (1 - p), the mask drawn anew for each step, layer and key; x where not training.

    Args:
        batch: its `dropped_parts(key)` are none where the batch is not trained on; `chosen` says
            which of its tokens x has, None for all.
        x: [T, n].
        p: probability that an element is dropped.
        key: of the dropout in its layer.
    """
    parts = list(batch.dropped_parts(key))
    if not parts:
        return x
    if p == 1.0:
        return torch.zeros_like(x)
    mask = x.new_empty(sum(part.count for part in parts), *x.shape[1:])
    for part in parts:
        drawn = x.new_empty(part.whole, *x.shape[1:])
        drawn.bernoulli_(1.0 - p, generator=part.generator)
        mask[part.start : part.start + part.count] = drawn[part.skipped :][: part.count]
    if batch.chosen is not None:
        mask = mask[batch.chosen]
    return mask.div_(1.0 - p).mul_(x)


def scale(y: Tensor, vector: Any, base: Tensor | None = None) -> Tensor:
    """vector ⊙ (y - base) + base, each token by its own adapter's vector; y where there is none.

    Args:
        y: [T, n]; not written over, as the base may read it elsewhere.
        vector: [n], the program's own or one adapter's, or a stack [adapters, 1, n] with segments.
        base: [n], what is not scaled.
    """
    if vector is None:
        return y
    if isinstance(vector, tuple):
        for one in vector:
            y = scale(y, one, base)
        return y
    weight: Tensor = vector if isinstance(vector, Tensor) else vector.weight
    segments = None if isinstance(vector, Tensor) else vector.segments
    if segments is None:
        return _scaled(y, weight, base)
    rows = y[segments.start : segments.stop]
    if segments.is_batched:
        scaled = _scaled(rows.view(weight.shape[0], segments.size, -1), weight, base).view(
            rows.shape
        )
    else:
        sizes = torch.tensor(segments.sizes, device=y.device)
        scaled = _scaled(rows, weight[:, 0].repeat_interleave(sizes, 0), base)
    if rows.shape[0] == y.shape[0]:
        return scaled
    return torch.cat((y[: segments.start], scaled, y[segments.stop :]))


def _scaled(y: Tensor, vector: Tensor, base: Tensor | None) -> Tensor:
    if base is None:
        return (y * vector).to(y.dtype)
    return torch.addcmul(base.to(vector.dtype), y - base, vector).to(y.dtype)


def inner(left: Tensor, right: Tensor, base: Tensor | None = None) -> Tensor:
    """The sum over tokens of left ⊙ (right - base), [n], in fp32 at least."""
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    if base is not None:
        right = right - base
    return (left.to(wide) * right.to(wide)).sum(0)


def column_norm(weight: Tensor, a: Any, b: Any) -> Tensor:
    """||W + scale · B A|| of each output, [out], in A's dtype."""
    whole = torch.addmm(weight.to(a.weight.dtype), b.weight, a.weight, alpha=b.scale)
    norm: Tensor = torch.linalg.vector_norm(whole, dim=1)
    return norm


def column_norm_part(weight: Tensor, a: Any, b: Any, batch: Any) -> Tensor:
    """The same where each rank has columns of the weight, and of A."""
    own = torch.addmm(weight.to(a.weight.dtype), b.weight, a.weight, alpha=b.scale)
    norm: Tensor = batch.ranks.all_reduce(own.square().sum(1)).sqrt()
    return norm


def column_factor(magnitude: Any, norm: Tensor) -> Tensor:
    """The magnitude in units of the length, [out]."""
    factor: Tensor = magnitude.weight / norm
    return factor


def activate(s: Any, bias: Any, function: str) -> Any:
    """σ(s + scale · bias) of a bottleneck; s and what comes out as `shrink` gives it.

    Args:
        s: [T, size], [tokens of adapters, size], or [adapters, tokens, size]; None where no token
            of the batch has such an adapter.
        bias: [size], or a stack [adapters, 1, size] with segments, scaled already.
        function: σ's name.
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


def vera_down(shared: Any, size: int) -> Tensor:
    """A site's A [r, in]: the shared matrix's first columns."""
    a: Tensor = shared.weight[:, :size]
    return a


def vera_up(shared: Any, lambda_b: Any, lambda_d: Any) -> Tensor:
    """A site's B [out, r]: the shared matrix's first rows, λ_b ⊙ B ⊙ λ_d."""
    b: Tensor = shared.weight[: len(lambda_b.weight)] * lambda_d.weight
    return b.mul_(lambda_b.weight.unsqueeze(-1))


def vera_up_backward(
    gradient: Tensor, shared: Any, lambda_b: Any, lambda_d: Any
) -> tuple[Tensor, Tensor]:
    """dλ_b [out] and dλ_d [r] of vera_up."""
    product = gradient * shared.weight[: len(lambda_b.weight)]
    return product @ lambda_d.weight, lambda_b.weight @ product


def singular_down(a: Any, e: Any) -> Tensor:
    """E ⊙ A, [r, in]."""
    scaled: Tensor = a.weight * e.weight
    return scaled


def singular_down_backward(gradient: Tensor, a: Any, e: Any) -> tuple[Tensor, Tensor]:
    """dA [r, in] and dE [r, 1] of singular_down."""
    return gradient * e.weight, (gradient * a.weight).sum(1, keepdim=True)


def as_weight(weight: Any) -> Any:
    """An adapter's weight as it is; one that the program made, wrapped likewise."""
    return AdapterWeight(weight) if isinstance(weight, Tensor) else weight

"""Adapters of emitted programs: by segmented kernels if they know the weights, else by PyTorch.

Names, shapes and meanings are those of `pcg.kernels.torch`. In serving weights are rows
(`LoraRows`) or stacks (`SegmentedWeight`), in training a single adapter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pcg.kernels.batch import AdapterSlot, LoraRows, SegmentedWeight, once
from pcg.kernels.sizes import ROW_ALIGNMENT
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.lora import by_width
from pcg.kernels.triton.adapters import segmented_lora, trained_adapters
from pcg.kernels.triton.adapters.rank_rows import RankRows, int32_on, rank_rows
from pcg.kernels.triton.adapters.segmented_activate import segmented_activate
from pcg.kernels.triton.adapters.segmented_vectors import segmented_bias_add, segmented_scale
from pcg.kernels.triton.adapters.token_tiles import TokenTiles, tiles_on
from pcg.peft.weights import AdapterWeight


def shrink(x: Tensor, a: Any) -> Any:
    """Return s = x Aᵀ, each token by its adapter; of rows, as the segmented kernels return it."""
    if isinstance(a, LoraRows):
        down, _ = matrices_of(a)
        return segmented_lora.shrink(x, down, tiles_of(a, x))
    return trained_adapters.shrink(x, a) if _is_trained(a) else torch_ops.shrink(x, a)


def activate(s: Any, bias: Any, function: str) -> Any:
    """Return σ(s + scale · bias) of a bottleneck; s and the result as `shrink` returns them."""
    if not isinstance(bias, LoraRows):
        return torch_ops.activate(s, bias, function)
    third, sizes = bias.first + 2 * len(bias.out_sizes), (ROW_ALIGNMENT,)
    rows = once(
        bias.known,
        "biases",
        lambda: rank_rows(bias.memory, bias.rows, third, bias.biases, (0,), sizes),
    )
    return segmented_activate(s, rows, bias.ranks, tiles_of(bias, s), function)


def expand_add(y: Tensor, s: Any, b: Any) -> Tensor:
    """Return y + scale · s Bᵀ, each token by its adapter; may be written over y."""
    if isinstance(b, LoraRows):
        _, up = matrices_of(b)
        return segmented_lora.expand_add(y, s, up, tiles_of(b, y))
    function = trained_adapters.expand_add if _is_trained(b) else torch_ops.expand_add
    return function(y, s, b)


def lora_linear(
    x: Tensor,
    weights: Sequence[Any],
    biases: Sequence[Tensor | None],
    a: Sequence[Any],
    b: Sequence[Any],
) -> Sequence[Tensor]:
    """Apply linear operators to x with each token's LoRA, where none is deferred."""
    first = weights[0]
    return add_lora(torch_ops.linear(x, first, first.group_bias), x, first, a, b)


def add_lora(
    y: Tensor, x: Tensor, weight: Any, a: Sequence[Any], b: Sequence[Any]
) -> Sequence[Tensor]:
    """Add each token's LoRA to the joined product of some linear operators."""
    lora = a[0]
    if not isinstance(lora, LoraRows):
        return torch_ops.add_lora(y, x, weight, a, b)
    expand_add(y, shrink(x, lora), lora)
    sizes = weight.group_sizes
    return y.split(sizes, -1) if len(sizes) > 1 else (y,)


def _is_trained(weight: Any) -> bool:
    return isinstance(weight, Tensor | AdapterWeight)


def tiles_of(lora: LoraRows, x: Tensor) -> TokenTiles:
    """Return tokens by adapter, computed once for all sites."""
    return once(lora.tokens.known, "tiles", lambda: tiles_on(lora.tokens.spans, x.device))


def matrices_of(lora: LoraRows) -> tuple[RankRows, RankRows]:
    """Return A and B of the site, computed once for a location of the tables."""

    def make() -> tuple[RankRows, RankRows]:
        count = len(lora.out_sizes)
        tables, starts, sizes = (lora.memory, lora.rows), (0,) * count, (lora.in_size,) * count
        down = rank_rows(*tables, lora.first, lora.ranks, starts, sizes)
        up = rank_rows(*tables, lora.first + count, lora.ranks, lora.out_starts, lora.out_sizes)
        return down, up

    return once(lora.known, "matrices", make)


def scale(y: Tensor, vector: Any, base: Tensor | None = None) -> Tensor:
    """Return vector ⊙ (y - base) + base, each token by its adapter's vector."""
    for of_width in by_width(vector):
        if _is_stack(y, of_width):
            # What the base makes may be read elsewhere, too.
            y = segmented_scale(y.clone(), *_vectors(y, of_width), base)
        else:
            y = torch_ops.scale(y, of_width, base)
    return y


def bias_add(y: Tensor, bias: Any, base: Tensor | None = None) -> Tensor:
    """Return y + bias, or y + (bias - base), each token with its adapter's bias."""
    for of_width in by_width(bias):
        if _is_stack(y, of_width):
            y = segmented_bias_add(y, *_vectors(y, of_width), base)
        else:
            y = torch_ops.bias_add(y, of_width, base)
    return y


def _is_stack(y: Tensor, vector: Any) -> bool:
    is_aligned = y.dim() == 2 and not y.shape[1] % ROW_ALIGNMENT
    return is_aligned and isinstance(vector, SegmentedWeight)


def _vectors(y: Tensor, vector: SegmentedWeight) -> tuple[RankRows, TokenTiles]:
    """Return the stack's vectors as rows, and the tokens by their index in it."""
    segments, (count, _, size) = vector.segments, vector.weight.shape
    known, key = segments.known, ("vectors", vector.present, size)
    memory = vector.weight.view(-1)
    if key not in known:
        rows = size * torch.arange(count, device=y.device)
        ranks = int32_on([vector.present], y.device)
        known[key] = rank_rows(memory, rows, 0, ranks, (0,), (size,))
    if "tiles" not in known:
        starts = accumulate(segments.sizes[:-1], initial=segments.start)
        slots = (AdapterSlot(number, number, 1) for number in range(count))
        spans = zip(starts, segments.sizes, slots, strict=True)
        known["tiles"] = tiles_on(list(spans), y.device)
    return replace(known[key], memory=memory), known["tiles"]

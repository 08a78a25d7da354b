"""Operators of bypass networks other than LoRA: dropout, activations, vectors, virtual tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.ir.operators.vectors import INNER_TOKENS
from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.base_operators import widened
from pcg.kernels.torch.lora import by_width


def dropout(batch: ProgramBatch, x: Tensor, p: float, key: int) -> Tensor:
    """Return x · mask / (1 - p), drawn for each step, layer and key; x outside of training."""
    parts = list(batch.dropped_parts(key))
    if not parts:
        return x
    if p == 1.0:
        return torch.zeros_like(x)
    mask = x.new_empty(sum(part.count for part in parts), *x.shape[1:])
    for part in parts:
        rows = mask[part.start : part.start + part.count]
        if part.count == part.whole:
            rows.bernoulli_(1.0 - p, generator=part.generator)
        else:
            block = x.new_empty(part.whole, *x.shape[1:])
            block.bernoulli_(1.0 - p, generator=part.generator)
            rows.copy_(block[part.skipped :][: part.count])
            del block  # before the next one is there
    if batch.chosen is not None:
        mask = mask[batch.chosen]
    return mask.div_(1.0 - p).mul_(x)


def activate(s: Any, bias: Any, function: str) -> Any:
    """Return σ(s + scale · bias) of a bottleneck; s and the result are as `shrink` returns them.

    The bias is [size], or a stack [adapters, 1, size] with segments, scaled already.
    """
    if s is None:
        return None
    if isinstance(s, tuple):
        return tuple(
            activate(of_width, bias_of_width, function)
            for of_width, bias_of_width in zip(s, bias, strict=True)
        )
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


def scale(y: Tensor, vector: Any, base: Tensor | None = None) -> Tensor:
    """Return vector ⊙ (y - base) + base, each token by its adapter's vector; y without a vector.

    The vector is [n], the program's or an adapter's, or a stack [adapters, 1, n] with segments. y
    [T, n] is not written over, as it may be read elsewhere.
    """
    for of_width in by_width(vector):
        y = _scale(y, of_width, base)
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
    """Return the sum over tokens of left ⊙ (right - base), [n], in fp32 at least."""
    total = left.new_zeros(left.shape[1:], dtype=torch.promote_types(left.dtype, torch.float32))
    for x, y in zip(left.split(INNER_TOKENS), right.split(INNER_TOKENS), strict=True):
        if base is not None:
            y = y - base
        total += (x.to(total.dtype) * y.to(total.dtype)).sum(0)
    return total


def bias_add(y: Tensor, bias: Any, base: Tensor | None = None) -> Tensor:
    """Return y + scale · bias, or y + (bias - base), each token with its adapter's bias."""
    for of_width in by_width(bias):
        y = _bias_add(y, of_width, base)
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


def replaced(
    y: Tensor, x: Tensor, weights: Any, bias: Tensor | None = None, *, function: str, offset: bool
) -> Tensor:
    """Return y with the results of `function` in rows of adapters with weights; written over."""
    for of_width in by_width(weights):
        for rows, weight in _own_rows(of_width):
            if function == "embedding":
                y[rows] = F.embedding(x[rows], weight)
                continue
            x_rows = x[rows].to(weight.dtype)
            if function == "linear":
                result = F.linear(x_rows, weight)
            else:
                result = x_rows * (weight + 1.0 if offset else weight)
            y[rows] = result if bias is None else result + bias
    return y


def _own_rows(weights: Any) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each adapter that has a weight, and the weight."""
    if weights.segments is None:
        yield slice(None), weights.weight
        return
    start = weights.segments.start
    for count, weight in zip(weights.segments.sizes, weights.weights, strict=True):
        if weight is not None and count:
            yield slice(start, start + count), weight
        start += count


def sum_tokens(dz: Tensor, bias: Any = None) -> Tensor:
    """Return the sum over tokens, in fp32 at least; scaled as a bias is."""
    total = widened(dz).sum(0)
    return total if bias is None else total.mul_(bias.scale)


def virtual_tokens(batch: ProgramBatch, x: Tensor, prompt: Any) -> Tensor:
    """Return x with its adapter's prompt, in x's dtype, in each virtual row.

    x is [T, …] of h features; the prompt is [n, h], or a stack [adapters, n, h] with segments,
    which may be padded, or None if no adapter of the batch has a prompt.
    """
    for of_width in by_width(prompt):
        x = _with_prompt(batch, x, of_width)
    return x


def _with_prompt(batch: ProgramBatch, x: Tensor, prompt: Any) -> Tensor:
    rows, places = batch.virtual_rows, batch.virtual_places
    if rows is None or places is None:
        return x
    if prompt.segments is None:
        embeddings = prompt.weight[places]
    else:
        segments = prompt.segments
        ends = torch.tensor(segments.sizes, device=x.device).cumsum(0) + segments.start
        # Rows of others count for the first or the last adapter, until they are left out.
        adapters = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        have = torch.tensor(prompt.present, device=x.device)[adapters]
        have &= (rows >= segments.start) & (rows < segments.stop)
        rows, places, adapters = rows[have], places[have], adapters[have]
        embeddings = prompt.weight[adapters, places]
    return x.index_copy(0, rows, embeddings.to(x.dtype).view(-1, *x.shape[1:]))


def without_virtual(batch: ProgramBatch, x: Tensor) -> Tensor:
    """Return x [T, …] with zeros in each virtual row."""
    return x if batch.virtual_rows is None else x.index_fill(0, batch.virtual_rows, 0.0)


def virtual_tokens_backward(batch: ProgramBatch, dy: Tensor, prompt: Any) -> Tensor:
    """Sum dy [T, …] over the rows of each virtual token: [n, h] in the prompt's dtype."""
    weight: Tensor = prompt.weight
    total = torch.zeros_like(weight)
    rows, places = batch.virtual_rows, batch.virtual_places
    if rows is None or places is None:
        return total
    return total.index_add_(0, places, dy[rows].flatten(1).to(weight.dtype))

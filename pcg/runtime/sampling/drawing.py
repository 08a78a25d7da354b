"""Drawing: a token per row, at a number u of the row's cumulative distribution.

Filters of a row's tokens: temperature, top-k, top-p and min-p.

    temperature          l / T
    top-k                keep l >= the k-th largest
    top-p                keep the smallest set of most likely tokens with a total probability of at
                         least p; among equally likely tokens, keep the last
    min-p                keep p >= min_p * max p

`filtered` sorts rows; a program's kernels `draw` and `keep` find the same tokens without sorting,
by the numbers of `limits_of`.

Source: transformers `generation/logits_process.py`, which the tests compare against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.kernels.batch import TokenLimits
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.runtime.sampling.sampling_params import SamplingParams

_LEAST_TEMPERATURE = 1e-30
"""The minimum temperature in fp32, at which the likeliest token has all probability."""


def filtered(logits_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; other tokens become -inf. [S, V] fp32."""
    device = logits_SV.device

    def indices(rows: Sequence[int]) -> Tensor:
        return uploaded_list(rows, torch.int64, device)

    def column(values: Sequence[float]) -> Tensor:
        return uploaded_list(values, torch.float32, device)[:, None]

    # The largest logit becomes 0, so that no temperature, however small, divides to infinity.
    logits_SV = logits_SV.float()
    logits_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
    if any(p.temperature != 1.0 for p in params):
        logits_SV = logits_SV / column([max(p.temperature, _LEAST_TEMPERATURE) for p in params])

    vocab = logits_SV.shape[-1]
    top_k = {row: p.top_k for row, p in enumerate(params) if p.top_k and p.top_k < vocab}
    if top_k:
        rows = indices(list(top_k))
        part = logits_SV[rows]
        largest = part.topk(max(top_k.values()), dim=-1).values
        kth = largest.gather(1, indices([k - 1 for k in top_k.values()])[:, None])
        logits_SV[rows] = part.masked_fill(part < kth, -math.inf)

    top_p = {row: p.top_p for row, p in enumerate(params) if p.top_p is not None and p.top_p < 1.0}
    if top_p:
        rows = indices(list(top_p))
        part = logits_SV[rows]
        ascending, order = part.sort(dim=-1, stable=True)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - column(list(top_p.values()))
        removed[:, -1] = False
        removed = removed.scatter(1, order, removed)
        logits_SV[rows] = part.masked_fill(removed, -math.inf)

    min_p = {row: p.min_p for row, p in enumerate(params) if p.min_p}
    if min_p:
        rows = indices(list(min_p))
        part = logits_SV[rows]
        # p / max p = exp(l - max l), and max l is 0.
        logits_SV[rows] = part.masked_fill(part.exp() < column(list(min_p.values())), -math.inf)
    return logits_SV


def limits_of(params: Sequence[SamplingParams], logits: Tensor) -> TokenLimits:
    """Return the limits of each row of logits [S, V] for kernels, in one copy to their device."""
    vocab = logits.shape[-1]
    top_k = [p.top_k if p.top_k and p.top_k < vocab else 0 for p in params]
    top_p = [1.0 if p.top_p is None else p.top_p for p in params]
    # Each list begins at 16 bytes: kernels would be compiled anew for a number of rows that is odd.
    count = len(params)
    numbers = torch.zeros((4, -(-count // 4) * 4), dtype=torch.float32)
    numbers[:, :count] = torch.tensor(
        [
            [max(p.temperature, _LEAST_TEMPERATURE) for p in params],
            top_k,
            top_p,
            [p.min_p or 0.0 for p in params],
        ],
        dtype=torch.float32,
    )
    numbers[2] = 1.0 - numbers[2]
    temperatures, kept, tails, min_p = uploaded(numbers, logits.device)[:, :count].unbind()
    is_cut = any(top_k) or any(p < 1.0 for p in top_p)
    return TokenLimits(temperatures, kept, tails, min_p, is_cut)


DrawKernel: TypeAlias = Callable[[Tensor, TokenLimits, Tensor], tuple[Tensor, Tensor]]
"""A kernel that draws tokens from logits, limits and numbers u; see `Drawing.draw`."""
KeepKernel: TypeAlias = Callable[[Tensor, TokenLimits], Tensor]
"""A kernel that filters logits by limits; see `Drawing.keep`."""


@dataclass(frozen=True)
class Drawing:
    """The sampling operators.

    Attributes:
        greedy: returns each row's most likely token, [R, V] to [R]; the first of equal tokens.
        draw: returns the tokens [R] drawn from logits [R, V] by each row's temperature, top-k,
            top-p and min-p, at its number u [R], and True for each that could be drawn, [R].
        keep: returns the logits [R, V] over each row's temperature, and -inf for the tokens that
            `draw` never draws.
    """

    greedy: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Sequence[SamplingParams], Tensor], tuple[Tensor, Tensor]]
    keep: Callable[[Tensor, Sequence[SamplingParams]], Tensor] = filtered

    @classmethod
    def by_kernels(
        cls, greedy: Callable[[Tensor], Tensor], draw: DrawKernel, keep: KeepKernel
    ) -> Drawing:
        """Return the kernels of a program, which find the tokens that may be drawn themselves."""

        def drawn(
            logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor
        ) -> tuple[Tensor, Tensor]:
            return draw(logits, limits_of(params, logits), uniform)

        def kept(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
            return keep(logits, limits_of(params, logits))

        return cls(greedy, drawn, kept)


def _draw(
    logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor
) -> tuple[Tensor, Tensor]:
    # fp64, as fp32 rounding would lose unlikely tokens of a large vocabulary.
    cumulative = filtered(logits, params).softmax(dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).squeeze(1)
    # Rounding can move the point to the total, past the last possible token.
    are_there = drawn < logits.shape[-1]
    if not drawn.is_cpu or not are_there.all():  # do not wait for a GPU
        drawn = torch.where(are_there, drawn, logits.argmax(dim=-1))
    return drawn, total.isfinite().squeeze(1)


def _greedy(logits: Tensor) -> Tensor:
    return logits.max(dim=-1).indices  # argmax of bf16 takes six times as long on CPUs


PYTORCH = Drawing(_greedy, _draw)
"""PyTorch's operators, on any device."""
